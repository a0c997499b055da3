"""The part of a model that one rank of several holds.

In mode "exact" every matrix is split by outputs, so that each number is computed as in one process. Attention and
recurrences keep the outputs and the state of their own heads or channels, and a feed-forward part those of its own
columns, until the next product; experts are whole, each on one rank. Other layers compute the same from their products,
and remember the same, on all ranks.

In mode "sum" that next product is split by inputs, which each rank has already: its own heads, its own columns. The
ranks add what they get. That is half of the exchanges, and other bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lmstate.distributed.cuts import Cut, LayerCut, LayerCuts, Members, member_of
from lmstate.distributed.matrices import (
    MatrixParts,
    ParallelMode,
    at,
    features,
    group_of,
    heads_of,
    shares,
    span,
    times,
    unit_of,
)
from lmstate.distributed.recurrences import cut_of_recurrence, part_of_recurrence
from lmstate.models.block import Block
from lmstate.models.families.dory import ScaledGates
from lmstate.models.families.mimo_v2_flash import NarrowValues
from lmstate.models.heads.assistant import AssistantHead
from lmstate.models.heads.block_head import BlockHead
from lmstate.models.heads.head import DraftHead
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.cca import CompressedConvAttention
from lmstate.models.layers.compressed_attention import CompressedAttention
from lmstate.models.layers.cross_attention import CrossAttention
from lmstate.models.layers.in_states import beside_states, read_by_state
from lmstate.models.layers.mla import MultiHeadLatentAttention
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.ngrams import NgramBlock
from lmstate.models.layers.parallel_hybrid import ParallelHybrid
from lmstate.models.layers.relative_attention import ConvolvedLayer, RelativeAttention
from lmstate.models.layers.zamba_hybrid import LayerAdapter, SharedTransformer, ZambaHybrid
from lmstate.models.mapped import mapped
from lmstate.models.model import Model
from lmstate.models.network import Network
from lmstate.ops import Norm, Sublayer, Weight
from lmstate.ops.weights.split import Gathering, PartWeight


@dataclass(frozen=True)
class Splitter(MatrixParts):
    """Makes the part of `group.rank` of `ranks`."""

    def __call__(self, model: Model, cuts: LayerCuts) -> Model:
        """The part of a model with these `layer_cuts`, which is not changed.

        Its fingerprint is that of the whole, and names the mode and the ranks where they change bits.
        """
        name = model.fingerprint + (f" parallel=sum:{self.ranks}" if self.mode == "sum" else "")
        return replace(model, network=self.network(model.network, cuts), _fingerprint=name)

    def network(self, whole: Network, cuts: LayerCuts) -> Network:
        """The part of a network."""
        done: dict[int, Any] = {}
        for block, cut in (*zip(whole.blocks, cuts), *_blocks_of_heads(whole, cuts)):
            self.mixer(block.mixer, member_of(cut, 0) if isinstance(block, NgramBlock) else cut, done)
            if type(block.mlp) is MLP and id(block.mlp) not in done:
                done[id(block.mlp)] = self.mlp(block.mlp)
        return replace(
            whole,
            embed=mapped(whole.embed, self.part, done),
            head=mapped(whole.head, self.part, done),
            entry=mapped(whole.entry, self.part, done),
            exit=mapped(whole.exit, self.part, done),
            blocks=mapped(whole.blocks, self.part, done),
            heads=mapped(whole.heads, self.part, done),
            encoder=mapped(whole.encoder, self.part, done),
        )

    def part(self, thing: Any) -> Any:
        """The part of a layer or a weight; the thing itself where it is to be taken apart, or to stay whole."""
        if type(thing) is MixtureOfExperts:
            return self.experts(thing)
        if _splits_latent(thing, self.ranks):
            return self.latent(thing)
        if type(thing) is CompressedAttention and len(thing.out_groups) >= self.ranks:
            return self.compressed(thing)
        if isinstance(thing, Weight):
            return self.outputs(thing)
        # States compute on each rank alone, so what they read stays whole.
        if not (read := read_by_state(thing)):
            return thing
        whole = {name: mapped(getattr(thing, name), self.kept) for name in read}
        return replace(beside_states(thing, self.part), **whole)

    def kept(self, thing: Any) -> Any:
        return self.whole(thing) if isinstance(thing, Weight) else thing

    def mixer(self, whole: Any, cut: LayerCut, done: dict[int, Any]) -> Any:
        """A mixer of the heads of this rank, shared with the layers before that have the same one."""
        if cut and id(whole) not in done:
            done[id(whole)] = self.cut_mixer(whole, cut, done)
        return mapped(whole, self.part, done)

    def cut_mixer(self, whole: Any, cut: LayerCut, done: dict[int, Any]) -> Any:
        if not isinstance(cut, Members):
            if not isinstance(cut, tuple):
                return part_of_recurrence(self, whole)
            return self.cross(whole, cut) if isinstance(whole, CrossAttention) else self.attention(whole, cut)
        first, second, *_ = cut.cuts
        if isinstance(whole, ParallelHybrid):
            attention, other = self.mixer(whole.attention, first, done), self.mixer(whole.other, second, done)
            return replace(whole, attention=attention, other=other)
        if isinstance(whole, ZambaHybrid):
            shared = self.transformer(whole.transformer, first, done)
            link, mamba = self.outputs(whole.link), self.mixer(whole.mamba, second, done)
            return replace(whole, transformer=shared, link=link, mamba=mamba)
        assert isinstance(first, tuple)
        if isinstance(whole, CompressedConvAttention):
            return self.convolved(whole, first)
        assert isinstance(whole, ConvolvedLayer)
        return replace(whole, attention=self.relative(whole.attention, first), mlp=mapped(whole.mlp, self.part, done))

    def attention(self, whole: Attention, kv_heads: Sequence[int]) -> Attention:
        """Attention of the heads of this rank."""
        own, own_kv = self.heads(whole, kv_heads)
        outputs, width = self.projected(whole, kv_heads), whole.heads // whole.kv_heads * _value_dim(whole)
        turned = whole.turned_weight
        if isinstance(whole, ScaledGates):
            whole = replace(whole, gate_scale=whole.gate_scale[features(own, whole.gates // whole.heads)])
        return replace(
            whole,
            qkv=self.rows(whole.qkv, outputs),
            qkv_bias=at(whole.qkv_bias, outputs),
            out=self.second(whole.out, times(kv_heads, width), whole.out_norm),
            heads=len(own),
            kv_heads=len(own_kv),
            gates=len(own) * (whole.gates // whole.heads),
            turned_weight=turned if turned is None or turned.ndim == 1 else at(turned, own),
            sinks=at(whole.sinks, own),
            slopes=at(whole.slopes, own),
            biases=at(whole.biases, own),
        )

    def heads(
        self, whole: Attention | RelativeAttention | CrossAttention, kv_heads: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The numbers of the query heads and of the key/value heads of this rank."""
        own_kv = span(kv_heads, self.group.rank)
        return features(own_kv, whole.heads // whole.kv_heads), own_kv

    def projected(self, whole: Attention, kv_heads: Sequence[int]) -> Tensor:
        """The outputs of `qkv` that are of these heads."""
        own, own_kv = self.heads(whole, kv_heads)
        stored = () if whole.reads is not None else (whole.head_dim, _value_dim(whole))
        width = whole.head_dim * (2 if whole.gate else 1)  # of a query head's outputs
        rows, first = [features(own, width)], whole.heads * width
        for each in stored:
            rows.append(first + features(own_kv, each))
            first += whole.kv_heads * each
        if whole.gates:
            rows.append(first + features(own, whole.gates // whole.heads))
        return torch.cat(rows)

    def cross(self, whole: CrossAttention, kv_heads: Sequence[int]) -> CrossAttention:
        """Attention of the heads of this rank to a source."""
        own, own_kv = self.heads(whole, kv_heads)
        queries, kv = features(own, whole.head_dim), features(own_kv, whole.head_dim)
        kv = torch.cat([kv, whole.kv_heads * whole.head_dim + kv])
        return replace(
            whole,
            queries=self.rows(whole.queries, queries),
            query_bias=at(whole.query_bias, queries),
            kv=self.rows(whole.kv, kv),
            kv_bias=at(whole.kv_bias, kv),
            out=self.second(whole.out, times(kv_heads, whole.heads // whole.kv_heads * whole.head_dim)),
            heads=len(own),
            kv_heads=len(own_kv),
        )

    def transformer(self, whole: SharedTransformer, cut: LayerCut, done: dict[int, Any]) -> SharedTransformer:
        """The transformer block of Zamba, whose attention and its adapters have the heads of this rank."""
        if not isinstance(cut, tuple) or not cut:
            return mapped(whole, self.part, done)
        return replace(
            whole,
            attention=self.mixer(whole.attention, cut, done),
            attention_adapter=self.adapter(whole.attention_adapter, self.projected(whole.attention, cut)),
            mlp=mapped(whole.mlp, self.part, done),
            mlp_adapter=mapped(whole.mlp_adapter, self.part, done),
        )

    def adapter(self, whole: LayerAdapter | None, outputs: Tensor) -> LayerAdapter | None:
        """An adapter to some of its outputs."""
        if whole is None:
            return None
        ups, first = [], 0
        for up in whole.ups:
            own = outputs[(outputs >= first) & (outputs < first + up.out_features)] - first
            ups.append(self.rows(up, own))
            first += up.out_features
        return replace(whole, down=self.outputs(whole.down), ups=tuple(ups))

    def convolved(self, whole: CompressedConvAttention, kv_heads: Sequence[int]) -> CompressedConvAttention:
        """Compressed convolutional attention of the heads of this rank. The first half of the values is of the token
        itself, and the second one comes late."""
        (heads, count), dim, late_widths = whole.heads, whole.attention.head_dim, late_values(whole, kv_heads)
        own, own_kv = self.heads(whole.attention, kv_heads)
        qk = torch.cat([features(own, dim), heads * dim + features(own_kv, dim)])
        behind, half = (heads + count) * dim, count * dim // 2
        late, values = span(late_widths, self.group.rank), features(own_kv, dim)
        channels = torch.cat([qk, behind + late])
        outputs = torch.cat([channels, behind + half + values[values < half]])
        attention = replace(
            self.attention(whole.attention, kv_heads),
            qkv=self.rows(whole.attention.qkv, outputs),
            qkv_bias=at(whole.attention.qkv_bias, outputs),
        )
        return replace(
            whole,
            attention=attention,
            conv=whole.conv[channels],
            head_conv=whole.head_conv[torch.cat([own, heads + own_kv])],
            conv_bias=whole.conv_bias[qk],
            key_scale=whole.key_scale[own_kv],
            late_bias=at(whole.late_bias, late),
        )

    def relative(self, whole: RelativeAttention, kv_heads: Sequence[int]) -> RelativeAttention:
        """Attention by content and distance, of the heads of this rank. Each has the distances of all."""
        own, own_kv = self.heads(whole, kv_heads)
        dim, stored = whole.head_dim, whole.kv_heads * whole.head_dim
        kv = features(own_kv, dim)
        kv = torch.cat([kv, stored + kv])
        queries, first = whole.heads * dim, whole.heads * dim + 2 * stored
        relative = features(own, (whole.project.out_features - first) // whole.heads)
        return replace(
            whole,
            project=self.rows(whole.project, torch.cat([features(own, dim), queries + kv, first + relative])),
            out=self.second(whole.out, times(kv_heads, queries // whole.kv_heads)),
            heads=len(own),
            kv_heads=len(own_kv),
            bank=self.whole(whole.bank),
            conv=replace(whole.conv, taps=whole.conv.taps[kv]),
        )

    def compressed(self, whole: CompressedAttention) -> CompressedAttention:
        """Attention to compressed entries, of the groups of heads of this rank. All ranks store what all heads read."""
        groups = heads_of(len(whole.out_groups), self.ranks)
        own_groups = span(groups, self.group.rank)
        own = features(own_groups, len(whole.sinks) // len(whole.out_groups))
        return replace(
            whole,
            down=self.outputs(whole.down),
            q_up=self.rows(whole.q_up, features(own, whole.dim)),
            sinks=whole.sinks[own],
            out_groups=whole.out_groups[own_groups].contiguous(),
            out=self.second(whole.out, times(groups, whole.out_groups.shape[-1])),
            inputs=mapped(whole.inputs, self.part),
            index=mapped(whole.index, self.part),
        )

    def latent(self, whole: MultiHeadLatentAttention) -> MultiHeadLatentAttention:
        """Latent attention of the heads of this rank. All ranks store the latents, which all heads read."""
        count, nope, _ = whole.key_up.shape
        value, gate = whole.value_up.shape[2], whole.gates // count
        heads = heads_of(count, self.ranks)
        own = span(heads, self.group.rank)
        down, bias, q_up = self.outputs(whole.down), whole.down_bias, whole.q_up
        if q_up is not None:
            q_up = self.rows(q_up, features(own, q_up.out_features // count))
        if q_up is None or gate:  # some outputs of `down` are of heads
            behind = whole.down.out_features - whole.gates
            width = nope + whole.rope_dim if q_up is None else 0  # of a head's query among them
            shared = torch.arange(count * width, behind)
            outputs = torch.cat([features(own, width), shared, behind + features(own, gate)])
            down, bias = self.rows(whole.down, outputs), at(bias, outputs)
        return replace(
            whole,
            down=down,
            down_bias=bias,
            q_up=q_up,
            key_up=whole.key_up[own].contiguous(),
            value_up=whole.value_up[own].contiguous(),
            out=self.second(whole.out, [each * value for each in heads]),
            gates=len(own) * gate,
            sinks=at(whole.sinks, own),
            index=mapped(whole.index, self.part),
        )

    def mlp(self, whole: MLP) -> MLP:
        """A feed-forward part of the columns of this rank, or with both matrices split where these are too few."""
        unit = unit_of(whole.up) if self.mode == "exact" else max(unit_of(whole.up), group_of(whole.down))
        columns = shares(whole.down.in_features, self.ranks, unit)
        if columns is None:
            return replace(whole, up=self.outputs(whole.up), down=self.outputs(whole.down))
        own = span(columns, self.group.rank)
        outputs = torch.cat([own, own + whole.down.in_features]) if whole.gated else own
        return replace(
            whole,
            up=self.rows(whole.up, outputs),
            up_bias=at(whole.up_bias, outputs),
            factors=at(whole.factors, outputs),
            down=self.second(whole.down, columns, whole.down_norm),
        )

    def experts(self, whole: MixtureOfExperts) -> MixtureOfExperts:
        """A mixture of the experts of this rank. Router and gate stay whole."""
        owned = shares(len(whole.experts), self.ranks)
        shared = self.mlp(whole.shared) if type(whole.shared) is MLP else mapped(whole.shared, self.part)
        router = mapped(whole.router, self.kept if isinstance(whole.router, Router) else self.part)
        shared_gate = mapped(whole.shared_gate, self.kept)
        if owned is None:
            return OwnedExperts(router, mapped(list(whole.experts), self.part), shared, shared_gate, whole.scale_input)
        first = sum(owned[: self.group.rank])
        own = list(whole.experts[first : first + owned[self.group.rank]])
        return OwnedExperts(
            router,
            mapped(own, self.kept),
            shared,
            shared_gate,
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


def layer_cuts(network: Network, ranks: int) -> LayerCuts:
    """The cut of the state of each block, and of each head that drafts.

    It is empty where a mixer has too few heads, or cannot be taken apart by heads.

    Blocks that read each other's keys and values are split alike.
    """
    blocks = network.blocks
    cuts = [_cut(block.mixer, ranks) for block in blocks]
    groups: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        groups.setdefault(index if block.reads is None else block.reads, []).append(index)
    borrowed = [
        (source, block.mixer)
        for head in network.heads
        if isinstance(head, AssistantHead)
        for source, block in zip(head.sources, head.blocks, strict=True)
    ]
    for members in groups.values():
        readers = [mixer for source, mixer in borrowed if source in members]
        if not all(cuts[index] for index in members) or not all(_cut(mixer, ranks) for mixer in readers):
            for index in members:
                cuts[index] = ()
    of_blocks = (Members((cut,)) if isinstance(block, NgramBlock) else cut for block, cut in zip(blocks, cuts))
    return (*of_blocks, *(_cut_of_head(head, ranks) for head in network.heads))


def _cut_of_head(head: DraftHead, ranks: int) -> LayerCut:
    if isinstance(head, AssistantHead):
        return ()  # its blocks attend to what the model stores
    own = Members(tuple(_cut(block.mixer, ranks) or () for block in head.blocks))
    return own if isinstance(head, BlockHead) else Members(((), own))


def _blocks_of_heads(network: Network, cuts: LayerCuts) -> Iterator[tuple[Block, LayerCut]]:
    """The blocks of heads that draft, each with the cut of its state, or of what it attends to."""
    for head, cut in zip(network.heads, cuts[len(network.blocks) :], strict=True):
        if isinstance(head, AssistantHead):
            yield from zip(head.blocks, (cuts[source] for source in head.sources), strict=True)
        else:
            own = cut if isinstance(head, BlockHead) else member_of(cut, 1)
            yield from ((block, member_of(own, at)) for at, block in enumerate(head.blocks))


BY_HEADS = Attention, NarrowValues, ScaledGates
"""Types of attention whose heads know nothing of each other."""


def _value_dim(mixer: Attention) -> int:
    """Features of a value of a head."""
    return mixer.value_dim if isinstance(mixer, NarrowValues) else mixer.head_dim


def _cut(mixer: object, ranks: int) -> LayerCut:
    if type(mixer) in BY_HEADS:
        assert isinstance(mixer, Attention)
        return tuple(heads_of(mixer.kv_heads, ranks)) if _splits(mixer, ranks) else ()
    if type(mixer) is CrossAttention:
        return (
            tuple(heads_of(mixer.kv_heads, ranks))
            if ranks <= mixer.kv_heads and mixer.heads % mixer.kv_heads == 0
            else ()
        )
    if isinstance(mixer, ParallelHybrid):
        return Members((_cut(mixer.attention, ranks), _cut(mixer.other, ranks)))
    if isinstance(mixer, ZambaHybrid):
        return Members((_cut(mixer.transformer.attention, ranks), _cut(mixer.mamba, ranks)))
    if isinstance(mixer, CompressedConvAttention):
        return _cut_of_convolved(mixer, ranks)
    return (
        _cut_of_relative(mixer.attention, ranks)
        if isinstance(mixer, ConvolvedLayer)
        else cut_of_recurrence(mixer, ranks)
    )


def _cut_of_convolved(mixer: CompressedConvAttention, ranks: int) -> LayerCut:
    kv_heads, dim = _cut(mixer.attention, ranks), mixer.attention.head_dim
    if not isinstance(kv_heads, tuple) or not kv_heads:
        return ()
    heads, count = mixer.heads
    own = times(kv_heads, heads // count)
    qk, late = (times(own, dim), times(kv_heads, dim)), late_values(mixer, kv_heads)
    return Members((kv_heads, {"conv": Cut(-1, (*qk, late)), "head_conv": Cut(-2, (own, kv_heads))}))


def late_values(mixer: CompressedConvAttention, kv_heads: Sequence[int]) -> tuple[int, ...]:
    """Of each rank's values, the number that come a token late: they are the second half of all."""
    half, dim = sum(kv_heads) * mixer.attention.head_dim // 2, mixer.attention.head_dim
    ends = [dim * sum(kv_heads[: rank + 1]) for rank in range(len(kv_heads))]
    return tuple(max(end, half) - max(start, half) for start, end in pairwise([0, *ends]))


def _cut_of_relative(mixer: RelativeAttention, ranks: int) -> LayerCut:
    if mixer.kv_heads < ranks or mixer.heads % mixer.kv_heads:
        return ()
    if any(norm.weight.shape != (mixer.head_dim,) for norm in (mixer.q_norm, mixer.k_norm)):
        return ()
    kv_heads = tuple(heads_of(mixer.kv_heads, ranks))
    own = times(kv_heads, mixer.head_dim)
    return Members((kv_heads, {"conv": Cut(-1, (own, own))}))


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
