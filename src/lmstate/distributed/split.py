"""The part of a model that one rank of several holds.

Every matrix is split by outputs, so that each number is computed as in one process. Attention keeps the outputs of its
own heads, with their keys and values, and a feed-forward part those of its own columns, until the next product; experts
are whole, each on one rank. Other layers compute the same from their products, and remember the same, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lmstate.models.block import Block
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mamba import Mamba
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rg_lru import RecurrentBlock
from lmstate.models.layers.rwkv import TimeMix
from lmstate.models.mapped import mapped
from lmstate.models.model import Model
from lmstate.ops import Norm, Sublayer, Weight
from lmstate.ops.weights.bfloat12 import common_bytes, packed, to_bfloat12
from lmstate.ops.weights.grouped import BLOCK
from lmstate.ops.weights.split import Gathering, SplitWeight, selected

HeadWidths = tuple[tuple[int, ...], ...]
"""For each layer the kv heads of every rank; empty where each of them holds its state whole."""
READ_BY_STATES: dict[type, tuple[str, ...]] = {
    Mamba: ("select", "dt_project"),
    RecurrentBlock: ("gates",),
    TimeMix: ("key", "value", "receptance"),
}
"""Weights that layers multiply by inside their states, which compute on each rank alone when a draft is accepted in
part: they stay whole."""
SPAN = 4
"""Outputs of a float matrix that native bodies read together."""


def shares(count: int, ranks: int, unit: int = 1) -> list[int] | None:
    """Parts of `count`, one for each rank, of about the same size and of whole units; None where they are too few."""
    units = -(-count // unit)
    if units < ranks:
        return None
    bounds = [min(count, units * rank // ranks * unit) for rank in range(ranks + 1)]
    return [stop - first for first, stop in pairwise(bounds)]


@dataclass(frozen=True)
class Splitter:
    """Makes the part of `group.rank` of `ranks`."""

    group: Gathering
    ranks: int

    def __call__(self, model: Model, widths: HeadWidths) -> Model:
        """The part of a model with these `head_widths`, which is not changed. Its fingerprint is that of the whole."""
        done: dict[int, Any] = {}
        blocks = []
        for block, kv_heads in zip(model.blocks, widths, strict=True):
            if kv_heads and id(block.mixer) not in done:
                assert isinstance(block.mixer, Attention)
                done[id(block.mixer)] = self.attention(block.mixer, kv_heads)
            if type(block.mlp) is MLP and id(block.mlp) not in done:
                done[id(block.mlp)] = self.mlp(block.mlp)
            blocks.append(mapped(block, self.part, done))
        network = replace(
            model.network,
            embed=mapped(model.embed, self.part, done),
            head=mapped(model.head, self.part, done),
            entry=mapped(model.network.entry, self.part, done),
            blocks=tuple(blocks),
        )
        return replace(model, network=network, _fingerprint=model.fingerprint)

    def part(self, thing: Any) -> Any:
        """The part of a layer or a weight; the thing itself where it is to be taken apart, or to stay whole."""
        if type(thing) is MixtureOfExperts:
            return self.experts(thing)
        if isinstance(thing, Weight):
            return self.outputs(thing)
        if (whole := READ_BY_STATES.get(type(thing))) is not None:
            parts = {each.name: getattr(thing, each.name) for each in fields(thing) if each.name not in whole}
            return replace(thing, **{name: mapped(part, self.part) for name, part in parts.items()})
        return thing

    def outputs(self, weight: Weight, inputs: Sequence[int] | None = None) -> Weight:
        """A share of the outputs of a weight, in blocks as they are stored; the weight where these are too few.

        inputs: as of `SplitWeight`, which is then made in any case.
        """
        widths = shares(weight.out_features, self.ranks, _unit(weight)) or (
            inputs and shares(weight.out_features, self.ranks)
        )
        if not widths:
            return weight
        return SplitWeight(self.rows(weight, _span(widths, self.group.rank)), self.group, widths, inputs)

    def rows(self, weight: Weight, outputs: Tensor) -> Weight:
        """Some outputs of a weight, packed as the whole would be: that decides on the bits of its products."""
        part, table = selected(weight, outputs).in_large_pages(), common_bytes(weight)
        return part if table is None else packed(part, table)

    def attention(self, whole: Attention, kv_heads: Sequence[int]) -> Attention:
        """Attention of the heads of this rank."""
        group, dim = whole.heads // whole.kv_heads, whole.head_dim
        own_kv = _span(kv_heads, self.group.rank)
        own = (own_kv[:, None] * group + torch.arange(group)).flatten()
        stored = 0 if whole.reads is not None else whole.kv_heads * dim
        width = dim * (2 if whole.gate else 1)  # of a query head's outputs
        rows, first = [_of_heads(own, width)], whole.heads * width
        for _ in range(2 if stored else 0):
            rows.append(first + _of_heads(own_kv, dim))
            first += stored
        if whole.gates:
            rows.append(first + _of_heads(own, whole.gates // whole.heads))
        outputs = torch.cat(rows)
        return replace(
            whole,
            qkv=self.rows(whole.qkv, outputs),
            qkv_bias=_at(whole.qkv_bias, outputs),
            out=self.outputs(whole.out, [count * group * dim for count in kv_heads]),
            heads=len(own),
            kv_heads=len(own_kv),
            gates=len(own) * (whole.gates // whole.heads),
            sinks=_at(whole.sinks, own),
            slopes=_at(whole.slopes, own),
            biases=_at(whole.biases, own),
        )

    def mlp(self, whole: MLP) -> MLP:
        """A feed-forward part of the columns of this rank, or with both matrices split where these are too few."""
        columns = shares(whole.down.in_features, self.ranks, _unit(whole.up))
        if columns is None:
            return replace(whole, up=self.outputs(whole.up), down=self.outputs(whole.down))
        own = _span(columns, self.group.rank)
        outputs = torch.cat([own, own + whole.down.in_features]) if whole.gated else own
        return replace(
            whole,
            up=self.rows(whole.up, outputs),
            up_bias=_at(whole.up_bias, outputs),
            factors=_at(whole.factors, outputs),
            down=self.outputs(whole.down, columns),
        )

    def experts(self, whole: MixtureOfExperts) -> MixtureOfExperts:
        """A mixture of the experts of this rank. Router and gate stay whole."""
        owned = shares(len(whole.experts), self.ranks)
        shared = self.mlp(whole.shared) if type(whole.shared) is MLP else mapped(whole.shared, self.part)
        router = whole.router if isinstance(whole.router, Router) else mapped(whole.router, self.part)
        if owned is None:
            return OwnedExperts(
                router, mapped(list(whole.experts), self.part), shared, whole.shared_gate, whole.scale_input
            )
        first = sum(owned[: self.group.rank])
        own = list(whole.experts[first : first + owned[self.group.rank]])
        return OwnedExperts(
            router,
            mapped(own, lambda part: to_bfloat12(part.in_large_pages()) if isinstance(part, Weight) else part),
            shared,
            whole.shared_gate,
            whole.scale_input,
            self.group,
            tuple(owned),
        )


@dataclass(frozen=True, eq=False)
class OwnedExperts(MixtureOfExperts):
    """A mixture of which each rank has some experts: `owned[rank]` of them in their order, this one `experts`."""

    group: Gathering | None = None
    owned: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return sum(self.owned) or len(self.experts)

    def outputs(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if self.group is None:
            return super().outputs(parts)
        bounds = [0, *accumulate(self.owned)]
        first = bounds[self.group.rank]
        own = super().outputs(parts[first : first + len(self.experts)])
        counts = [sum(map(len, parts[start:stop])) for start, stop in pairwise(bounds)]
        if not any(counts):
            return []
        features = parts[0].shape[-1]
        return [self.group.gather(torch.cat([parts[0].new_zeros(0, features), *own]), counts, dim=0)]

    def sublayers(
        self, norm: Norm | None, post_norm: Norm | None, scale: float, parallel: bool
    ) -> tuple[Sublayer, ...]:
        return ()


def head_widths(blocks: Sequence[Block], ranks: int) -> HeadWidths:
    """For each block the kv heads of every rank; empty where its mixer is not plain attention, or has too few heads.

    Blocks that read each other's keys and values are split alike.
    """
    able = [_splits(block.mixer, ranks) for block in blocks]
    groups: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        groups.setdefault(index if block.reads is None else block.reads, []).append(index)
    for members in groups.values():
        if not all(able[index] for index in members):
            for index in members:
                able[index] = False
    return tuple(
        tuple(shares(block.mixer.kv_heads, ranks) or ()) if able[index] and isinstance(block.mixer, Attention) else ()
        for index, block in enumerate(blocks)
    )


def _splits(mixer: object, ranks: int) -> bool:
    if type(mixer) is not Attention or mixer.kv_heads < ranks or mixer.heads % mixer.kv_heads:
        return False
    norms = [norm for norm in (mixer.q_norm, mixer.k_norm, mixer.v_norm) if norm is not None]
    by_head = all(norm.weight.shape == (mixer.head_dim,) for norm in norms)
    return by_head and mixer.gates % mixer.heads == 0 and not isinstance(mixer.out, SplitWeight)


def _unit(weight: Weight) -> int:
    """Number of outputs that are stored together."""
    return BLOCK if weight.kind in ("int4", "int8") else SPAN


def _span(widths: Sequence[int], rank: int) -> Tensor:
    """The numbers of a rank's part, int64."""
    first = sum(widths[:rank])
    return torch.arange(first, first + widths[rank])


def _of_heads(heads: Tensor, width: int) -> Tensor:
    """The outputs of heads of a width, head after head."""
    return (heads[:, None] * width + torch.arange(width)).flatten()


def _at(tensor: Tensor | None, places: Tensor) -> Tensor | None:
    return None if tensor is None else tensor[places].contiguous()
