"""The part of a model that one rank of several holds.

In mode "exact" every matrix is split by outputs, so that each number is computed as in one process. Attention and
recurrences of heads keep the outputs and the state of their own heads, and a feed-forward part those of its own
columns, until the next product; experts are whole, each on one rank. Other layers compute the same from their products,
and remember the same, on all ranks.

In mode "sum" that next product is split by inputs, which each rank has already: its own heads, its own columns. The
ranks add what they get. That is half of the exchanges, and other bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor

from lmstate.distributed.cuts import Cut, LayerCut
from lmstate.models.block import Block
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.gated_delta_net import GatedDelta, LowRankProjection
from lmstate.models.layers.in_states import beside_states, read_by_state
from lmstate.models.layers.mamba2 import Mamba2
from lmstate.models.layers.mla import MultiHeadLatentAttention
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.mapped import mapped
from lmstate.models.model import Model
from lmstate.ops import Norm, Sublayer, Weight
from lmstate.ops.weights.bfloat12 import common_bytes, packed, to_bfloat12
from lmstate.ops.weights.grouped import BLOCK, GROUP
from lmstate.ops.weights.split import Gathering, PartWeight, SplitWeight, SummedWeight, selected, selected_inputs

ParallelMode: TypeAlias = Literal["exact", "sum"]
LayerCuts = tuple[LayerCut, ...]
"""The cut of the state of each layer."""
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
    mode: ParallelMode = "exact"

    def __call__(self, model: Model, cuts: LayerCuts) -> Model:
        """The part of a model with these `layer_cuts`, which is not changed.

        Its fingerprint is that of the whole, and names the mode and the ranks where they change bits.
        """
        done: dict[int, Any] = {}
        blocks = []
        for block, cut in zip(model.blocks, cuts, strict=True):
            if id(block.mixer) not in done:
                if cut:
                    done[id(block.mixer)] = self.mixer(block.mixer, cut)
                elif _splits_latent(block.mixer, self.ranks):
                    done[id(block.mixer)] = self.latent(block.mixer)
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
        name = model.fingerprint + (f" parallel=sum:{self.ranks}" if self.mode == "sum" else "")
        return replace(model, network=network, _fingerprint=name)

    def part(self, thing: Any) -> Any:
        """The part of a layer or a weight; the thing itself where it is to be taken apart, or to stay whole."""
        if type(thing) is MixtureOfExperts:
            return self.experts(thing)
        if isinstance(thing, Weight):
            return self.outputs(thing)
        # States compute on each rank alone, so what they read stays whole.
        return beside_states(thing, self.part) if read_by_state(thing) else thing

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

    def second(self, weight: Weight, inputs: Sequence[int], norm: Norm | None = None) -> Weight:
        """A matrix whose inputs lie on the ranks, `inputs[rank]` on each; a norm reads all of them first."""
        unit = _group(weight)
        if self.mode == "exact" or norm is not None or any(width % unit for width in inputs):
            return self.outputs(weight, inputs)
        own = selected_inputs(weight, sum(inputs[: self.group.rank]), inputs[self.group.rank])
        return SummedWeight(to_bfloat12(own.in_large_pages()), self.group, inputs)

    def mixer(self, whole: Mixer, cut: LayerCut) -> Mixer:
        """A mixer of the heads of this rank."""
        if isinstance(cut, tuple):
            assert isinstance(whole, Attention)
            return self.attention(whole, cut)
        if isinstance(whole, GatedDelta):
            return self.delta(whole)
        assert isinstance(whole, Mamba2)
        return self.mamba2(whole)

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
            out=self.second(whole.out, [count * group * dim for count in kv_heads], whole.out_norm),
            heads=len(own),
            kv_heads=len(own_kv),
            gates=len(own) * (whole.gates // whole.heads),
            sinks=_at(whole.sinks, own),
            slopes=_at(whole.slopes, own),
            biases=_at(whole.biases, own),
        )

    def latent(self, whole: MultiHeadLatentAttention) -> MultiHeadLatentAttention:
        """Latent attention of the heads of this rank. All ranks store the latents, which all heads read."""
        count, nope, _ = whole.key_up.shape
        value, gate = whole.value_up.shape[2], whole.gates // count
        heads = _shares(count, self.ranks)
        own = _span(heads, self.group.rank)
        down, bias, q_up = self.outputs(whole.down), whole.down_bias, whole.q_up
        if q_up is not None:
            q_up = self.rows(q_up, _of_heads(own, q_up.out_features // count))
        if q_up is None or gate:  # some outputs of `down` are of heads
            behind = whole.down.out_features - whole.gates
            width = nope + whole.rope_dim if q_up is None else 0  # of a head's query among them
            shared = torch.arange(count * width, behind)
            outputs = torch.cat([_of_heads(own, width), shared, behind + _of_heads(own, gate)])
            down, bias = self.rows(whole.down, outputs), _at(bias, outputs)
        return replace(
            whole,
            down=down,
            down_bias=bias,
            q_up=q_up,
            key_up=whole.key_up[own].contiguous(),
            value_up=whole.value_up[own].contiguous(),
            out=self.second(whole.out, [each * value for each in heads]),
            gates=len(own) * gate,
            sinks=_at(whole.sinks, own),
            index=mapped(whole.index, self.part),
        )

    def delta(self, whole: GatedDelta) -> GatedDelta:
        """A delta rule of the key heads of this rank, with the value heads that read them."""
        shared, keys, values = whole.heads // whole.key_heads, whole.key_dim, whole.value_dim
        key_heads = _shares(whole.key_heads, self.ranks)
        own_keys = _span(key_heads, self.group.rank)
        own = (own_keys[:, None] * shared + torch.arange(shared)).flatten()
        q, v = _of_heads(own_keys, keys), _of_heads(own, values)
        channels = torch.cat([q, whole.key_heads * keys + q, 2 * whole.key_heads * keys + v])
        # z follows q, k and v, or the bottlenecks of decay and z do, which are whole.
        first, low = len(whole.conv), whole.decay_up is not None
        rest = torch.arange(first, whole.qkvz.out_features) if low else first + v
        decay = own if len(whole.dt_bias) == whole.heads else _of_heads(own, keys)
        gates = own if low else torch.cat([own, whole.heads + decay])
        return replace(
            whole,
            qkvz=self.rows(whole.qkvz, torch.cat([channels, rest])),
            gates=self.rows(whole.gates, gates),
            out=self.second(whole.out, [count * shared * values for count in key_heads]),
            conv=whole.conv[channels],
            A=whole.A[own],
            dt_bias=whole.dt_bias[decay],
            key_heads=len(own_keys),
            decay_up=self.low_rank(whole.decay_up, decay),
            gate_up=self.low_rank(whole.gate_up, v),
        )

    def low_rank(self, whole: LowRankProjection | None, outputs: Tensor) -> LowRankProjection | None:
        """A projection to some of its outputs."""
        return whole and LowRankProjection(self.rows(whole.up, outputs), _at(whole.bias, outputs))

    def mamba2(self, whole: Mamba2) -> Mamba2:
        """A Mamba-2 mixer of the groups of this rank, with their heads."""
        heads, size = len(whole.A) // whole.groups, whole.state_size
        groups = _shares(whole.groups, self.ranks)
        own_groups = _span(groups, self.group.rank)
        own = (own_groups[:, None] * heads + torch.arange(heads)).flatten()
        x, b = _of_heads(own, whole.head_dim), _of_heads(own_groups, size)
        channels = torch.cat([x, whole.inner + b, whole.inner + whole.groups * size + b])
        outputs = torch.cat([x, whole.inner + channels, whole.inner + len(whole.conv) + own])
        norm = whole.norm
        if norm is not None:
            norm = replace(norm, norm=replace(norm.norm, weight=norm.norm.weight[x]), groups=len(own_groups))
        return replace(
            whole,
            project=self.rows(whole.project, outputs),
            out=self.second(whole.out, [count * heads * whole.head_dim for count in groups]),
            conv=whole.conv[channels],
            conv_bias=_at(whole.conv_bias, channels),
            A=whole.A[own],
            D=whole.D[own],
            dt_bias=whole.dt_bias[own],
            groups=len(own_groups),
            norm=norm,
            bias=_at(whole.bias, outputs),
            scale=_at(whole.scale, outputs),
        )

    def mlp(self, whole: MLP) -> MLP:
        """A feed-forward part of the columns of this rank, or with both matrices split where these are too few."""
        unit = _unit(whole.up) if self.mode == "exact" else max(_unit(whole.up), _group(whole.down))
        columns = shares(whole.down.in_features, self.ranks, unit)
        if columns is None:
            return replace(whole, up=self.outputs(whole.up), down=self.outputs(whole.down))
        own = _span(columns, self.group.rank)
        outputs = torch.cat([own, own + whole.down.in_features]) if whole.gated else own
        return replace(
            whole,
            up=self.rows(whole.up, outputs),
            up_bias=_at(whole.up_bias, outputs),
            factors=_at(whole.factors, outputs),
            down=self.second(whole.down, columns, whole.down_norm),
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
            self.mode,
        )


@dataclass(frozen=True, eq=False)
class OwnedExperts(MixtureOfExperts):
    """A mixture of which each rank has some experts: `owned[rank]` of them in their order, this one `experts`."""

    group: Gathering | None = None
    owned: tuple[int, ...] = ()
    mode: ParallelMode = "exact"

    @property
    def count(self) -> int:
        return sum(self.owned) or len(self.experts)

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = super().routed(x, weights, chosen)
        return out if self.group is None or self.mode == "exact" else self.group.sum(out)

    def outputs(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of the experts of all ranks; in mode "sum" zeros of those of the others."""
        if self.group is None:
            return super().outputs(parts)
        bounds = [0, *accumulate(self.owned)]
        first = bounds[self.group.rank]
        own = super().outputs(parts[first : first + len(self.experts)])
        if self.mode == "sum":
            before, behind = parts[:first], parts[first + len(self.experts) :]
            return [*map(torch.zeros_like, before), *own, *map(torch.zeros_like, behind)]
        counts = [sum(map(len, parts[start:stop])) for start, stop in pairwise(bounds)]
        if not any(counts):
            return []
        features = parts[0].shape[-1]
        return [self.group.gather(torch.cat([parts[0].new_zeros(0, features), *own]), counts, dim=0)]

    def sublayers(
        self, norm: Norm | None, post_norm: Norm | None, scale: float, parallel: bool
    ) -> tuple[Sublayer, ...]:
        return ()


def layer_cuts(blocks: Sequence[Block], ranks: int) -> LayerCuts:
    """The cut of each block's state; empty where its mixer has too few heads, or cannot be taken apart by heads.

    Blocks that read each other's keys and values are split alike.
    """
    cuts = [_cut(block.mixer, ranks) for block in blocks]
    groups: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        groups.setdefault(index if block.reads is None else block.reads, []).append(index)
    for members in groups.values():
        if not all(cuts[index] for index in members):
            for index in members:
                cuts[index] = ()
    return tuple(cuts)


def _cut(mixer: object, ranks: int) -> LayerCut:
    if type(mixer) is Attention:
        return tuple(_shares(mixer.kv_heads, ranks)) if _splits(mixer, ranks) else ()
    if type(mixer) is GatedDelta:
        return _cut_of_delta(mixer, ranks)
    return _cut_of_mamba2(mixer, ranks) if type(mixer) is Mamba2 else ()


def _splits(mixer: Attention, ranks: int) -> bool:
    if mixer.kv_heads < ranks or mixer.heads % mixer.kv_heads:
        return False
    norms = [norm for norm in (mixer.q_norm, mixer.k_norm, mixer.v_norm) if norm is not None]
    by_head = all(norm.weight.shape == (mixer.head_dim,) for norm in norms)
    return by_head and mixer.gates % mixer.heads == 0 and not isinstance(mixer.out, PartWeight)


def _splits_latent(mixer: object, ranks: int) -> TypeGuard[MultiHeadLatentAttention]:
    """Whether it is latent attention that has heads for all ranks, and a query's latent or queries of heads."""
    if type(mixer) is not MultiHeadLatentAttention or len(mixer.key_up) < ranks or mixer.gates % len(mixer.key_up):
        return False
    return mixer.q_up is not None or (mixer.q_norm is None and mixer.index is None)


def _cut_of_delta(mixer: GatedDelta, ranks: int) -> LayerCut:
    if mixer.key_heads < ranks or mixer.heads % mixer.key_heads or mixer.norm.weight.shape != (mixer.value_dim,):
        return ()
    if (mixer.decay_up is None) != (mixer.gate_up is None):
        return ()
    key_heads, shared = _shares(mixer.key_heads, ranks), mixer.heads // mixer.key_heads
    keys = tuple(count * mixer.key_dim for count in key_heads)
    values = tuple(count * shared * mixer.value_dim for count in key_heads)
    heads = tuple(count * shared for count in key_heads)
    return {"conv": Cut(-1, (keys, keys, values)), "recurrent": Cut(0, (heads,))}


def _cut_of_mamba2(mixer: Mamba2, ranks: int) -> LayerCut:
    """Of a mixer whose groups are normed each by itself."""
    if mixer.groups < ranks or (mixer.norm is not None and mixer.norm.groups != mixer.groups):
        return ()
    groups, heads = _shares(mixer.groups, ranks), len(mixer.A) // mixer.groups
    x = tuple(count * heads * mixer.head_dim for count in groups)
    b = tuple(count * mixer.state_size for count in groups)
    return {"conv": Cut(-1, (x, b, b)), "ssm": Cut(0, (tuple(count * heads for count in groups),))}


def _shares(count: int, ranks: int) -> list[int]:
    """`shares` of enough units for all ranks."""
    found = shares(count, ranks)
    assert found is not None
    return found


def _unit(weight: Weight) -> int:
    """Number of outputs that are stored together."""
    return BLOCK if weight.kind in ("int4", "int8") else SPAN


def _group(weight: Weight) -> int:
    """Number of inputs that share a scale."""
    return GROUP if weight.kind in ("int4", "int8") else 1


def _span(widths: Sequence[int], rank: int) -> Tensor:
    """The numbers of a rank's part, int64."""
    first = sum(widths[:rank])
    return torch.arange(first, first + widths[rank])


def _of_heads(heads: Tensor, width: int) -> Tensor:
    """The outputs of heads of a width, head after head."""
    return (heads[:, None] * width + torch.arange(width)).flatten()


def _at(tensor: Tensor | None, places: Tensor) -> Tensor | None:
    return None if tensor is None else tensor[places].contiguous()
