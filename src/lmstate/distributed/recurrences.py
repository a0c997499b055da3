"""Recurrences of which each rank has some heads, groups or channels, with their carries.

A state computes on each rank alone, when a draft is accepted in part say. So a split scan only reads what its rank has:
inputs that all ranks have whole, or those of its own heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmstate import ops
from lmstate.distributed.carries import coded_cuts
from lmstate.distributed.cuts import Cut
from lmstate.distributed.matrices import MatrixParts, Units, at, features, shares, span, times
from lmstate.models.layers.gated_delta_net import GatedDelta, LowRankProjection
from lmstate.models.layers.lightning import Lightning
from lmstate.models.layers.mamba import HeadedMamba, Mamba
from lmstate.models.layers.mamba2 import Mamba2
from lmstate.models.layers.mlstm import MLSTM
from lmstate.models.layers.rg_lru import RecurrentBlock
from lmstate.models.layers.rwkv import TimeMix
from lmstate.models.layers.short_conv import ShortConv
from lmstate.ops import Norm, Residual
from lmstate.ops.recurrent.gated_norm import gated_norm
from lmstate.ops.types.mixers import Mamba2Params
from lmstate.ops.weights.grouped import GROUP
from lmstate.ops.weights.split import Gathering
from lmstate.state import LayerState, RecurrentState, Step


class RecurrenceSplit(NamedTuple):
    """The split of a mixer among ranks. units: how many it has for a number of ranks; 0 where it stays whole."""

    units: Callable[[Any, int], int]
    cut: Callable[[Any, Units], Mapping[str, Cut]]
    part: Callable[[MatrixParts, Any, Units], Any]


def cut_of_recurrence(mixer: Any, ranks: int) -> Mapping[str, Cut]:
    """The cut of each tensor of its carry; empty where it has too few units, or cannot be taken apart."""
    how, units = RECURRENCES.get(type(mixer)), units_of(mixer, ranks)
    if how is None or not units:
        return {}
    cut = how.cut(mixer, units)
    return {**cut, **coded_cuts(mixer, cut)}


def units_of(mixer: object, ranks: int) -> Units:
    how = RECURRENCES.get(type(mixer))
    return tuple((how and shares(how.units(mixer, ranks), ranks)) or ())


def part_of_recurrence(parts: MatrixParts, mixer: object) -> Any:
    """A mixer of the units of this rank."""
    return RECURRENCES[type(mixer)].part(parts, mixer, units_of(mixer, parts.ranks))


def pieces(channels: int, ranks: int) -> int:
    """Pieces that channels are split in: whole groups of quantized inputs, where there are enough of them."""
    return channels // GROUP if channels % GROUP == 0 and channels >= ranks * GROUP else channels


# ---- the delta rule: by key heads, with the value heads that read them


def _delta_units(mixer: GatedDelta, ranks: int) -> int:
    if mixer.heads % mixer.key_heads or mixer.norm.weight.shape != (mixer.value_dim,):
        return 0
    return 0 if (mixer.decay_up is None) != (mixer.gate_up is None) else mixer.key_heads


def _delta_cut(mixer: GatedDelta, units: Units) -> Mapping[str, Cut]:
    heads = times(units, mixer.heads // mixer.key_heads)
    keys, values = times(units, mixer.key_dim), times(heads, mixer.value_dim)
    return {"conv": Cut(-1, (keys, keys, values)), "recurrent": Cut(0, (heads,))}


def _delta_part(parts: MatrixParts, whole: GatedDelta, units: Units) -> GatedDelta:
    shared, keys, values = whole.heads // whole.key_heads, whole.key_dim, whole.value_dim
    own_keys = span(units, parts.group.rank)
    own = features(own_keys, shared)
    q, v = features(own_keys, keys), features(own, values)
    channels = torch.cat([q, whole.key_heads * keys + q, 2 * whole.key_heads * keys + v])
    # z follows q, k and v, or the bottlenecks of decay and z do, which are whole.
    first, low = len(whole.conv), whole.decay_up is not None
    rest = torch.arange(first, whole.qkvz.out_features) if low else first + v
    decay = own if len(whole.dt_bias) == whole.heads else features(own, keys)
    gates = own if low else torch.cat([own, whole.heads + decay])

    def low_rank(whole: LowRankProjection | None, outputs: Tensor) -> LowRankProjection | None:
        return whole and LowRankProjection(parts.rows(whole.up, outputs), at(whole.bias, outputs))

    return replace(
        whole,
        qkvz=parts.rows(whole.qkvz, torch.cat([channels, rest])),
        gates=parts.rows(whole.gates, gates),
        out=parts.second(whole.out, times(units, shared * values)),
        conv=whole.conv[channels],
        A=whole.A[own],
        dt_bias=whole.dt_bias[decay],
        key_heads=len(own_keys),
        decay_up=low_rank(whole.decay_up, decay),
        gate_up=low_rank(whole.gate_up, v),
    )


# ---- Mamba-2: by groups with their heads; or by heads, where all read the same B and C, which each rank then has


def _by_heads(mixer: Mamba2, ranks: int) -> bool:
    return mixer.groups == 1 < ranks


def _mamba2_units(mixer: Mamba2, ranks: int) -> int:
    if _by_heads(mixer, ranks):
        return len(mixer.A)
    return mixer.groups if mixer.norm is None or mixer.norm.groups == mixer.groups else 0


def _mamba2_cut(mixer: Mamba2, units: Units) -> Mapping[str, Cut]:
    heads = times(units, len(mixer.A) // sum(units))
    x, size = times(heads, mixer.head_dim), mixer.state_size
    b = (size,) if _by_heads(mixer, len(units)) else times(units, size)
    return {"conv": Cut(-1, (x, b, b)), "ssm": Cut(0, (heads,))}


def _mamba2_part(parts: MatrixParts, whole: Mamba2, units: Units) -> Mamba2:
    by_heads, heads = _by_heads(whole, parts.ranks), times(units, len(whole.A) // sum(units))
    groups = torch.tensor([0]) if by_heads else span(units, parts.group.rank)
    own = span(heads, parts.group.rank)
    x, b = features(own, whole.head_dim), features(groups, whole.state_size)
    channels = torch.cat([x, whole.inner + b, whole.inner + whole.groups * whole.state_size + b])
    outputs = torch.cat([x, whole.inner + channels, whole.inner + len(whole.conv) + own])
    norm, widths = whole.norm, times(heads, whole.head_dim)
    normed_whole = by_heads and norm is not None
    if norm is not None and not normed_whole:
        norm = replace(norm, norm=replace(norm.norm, weight=norm.norm.weight[x]), groups=len(groups))
    part = replace(
        whole,
        project=parts.rows(whole.project, outputs),
        out=parts.outputs(whole.out) if normed_whole else parts.second(whole.out, widths),
        conv=whole.conv[channels],
        conv_bias=at(whole.conv_bias, channels),
        A=whole.A[own],
        D=whole.D[own],
        dt_bias=whole.dt_bias[own],
        groups=len(groups),
        norm=norm,
        bias=at(whole.bias, outputs),
        scale=at(whole.scale, outputs),
    )
    return _as(NormedTogether, part, group=parts.group, widths=widths) if normed_whole else part


@dataclass(frozen=True, eq=False)
class NormedTogether(Mamba2):
    """A part of a Mamba-2 whose norm is of the heads of all ranks, of which each has `widths[rank]` features."""

    group: Gathering | None = None
    widths: Units = ()

    @property
    def _params(self) -> Mamba2Params:
        return super()._params._replace(norm=None, norm_groups=1, gate_last=False)

    def sublayers(
        self, norm: Norm | None, post_norm: Norm | None, scale: float, parallel: bool = False
    ) -> tuple[ops.Sublayer, ...]:
        return ()

    def forward(self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        assert isinstance(cache, RecurrentState) and self.group is not None and self.norm is not None
        projected = ops.linear(x, self.project, self.bias, norm=norm)
        projected = projected if self.scale is None else projected * self.scale
        gate, inputs = projected.tensor_split([self.inner], dim=-1)
        y, gate = (self.group.gather(part, self.widths) for part in (cache.advance(inputs, step), gate))
        y = gated_norm(y, gate, self.norm.norm, groups=self.norm.groups, gate_last=self.norm.gate_last)
        return ops.linear(y, self.out, self.out_bias, residual=residual)


# ---- Mamba: by channels. Each rank convolves all of them, for all decide on dt, B and C


def _mamba_units(mixer: Mamba, ranks: int) -> int:
    return pieces(len(mixer.A), ranks)


def _mamba_cut(mixer: Mamba, units: Units) -> Mapping[str, Cut]:
    return {"ssm": Cut(0, (times(units, len(mixer.A) // sum(units)),))}


def _mamba_part(parts: MatrixParts, whole: Mamba, units: Units) -> Mamba:
    widths = times(units, len(whole.A) // sum(units))
    own = span(widths, parts.group.rank)
    both = torch.cat([own, len(whole.A) + own])
    part = replace(
        whole,
        project=parts.rows(whole.project, both),
        select=parts.whole(whole.select),
        dt_project=parts.rows(whole.dt_project, own),
        out=parts.second(whole.out, widths),
        dt_bias=whole.dt_bias[own],
        A=whole.A[own],
        D=whole.D[own],
        bias=at(whole.bias, both),
    )
    return _as(OwnChannels, part, group=parts.group, widths=widths)


@dataclass(eq=False)
class OwnChannels(Mamba):
    """A part of a Mamba: the convolution of all channels, the state space of `widths[rank]` of them."""

    group: Gathering | None = None
    widths: Units = ()

    def entered(self, x: Tensor) -> Tensor:
        assert self.group is not None
        return self.group.gather(x, self.widths)

    def own(self, x: Tensor) -> Tensor:
        assert self.group is not None
        return x.split(self.widths, dim=-1)[self.group.rank].contiguous()


# ---- Mamba of heads, which decide each for itself


def _headed_units(mixer: HeadedMamba, ranks: int) -> int:
    return mixer.heads


def _headed_cut(mixer: HeadedMamba, units: Units) -> Mapping[str, Cut]:
    widths = times(units, len(mixer.A) // mixer.heads)
    return {"conv": Cut(-1, (widths,)), "ssm": Cut(0, (widths,))}


def _headed_part(parts: MatrixParts, whole: HeadedMamba, units: Units) -> HeadedMamba:
    width = len(whole.A) // whole.heads
    heads = span(units, parts.group.rank)
    own = features(heads, width)
    both = torch.cat([own, len(whole.A) + own])
    return replace(
        whole,
        project=parts.rows(whole.project, both),
        select=parts.rows(whole.select, features(heads, whole.select.out_features // whole.heads)),
        dt_project=parts.rows(whole.dt_project, own),
        out=parts.second(whole.out, times(units, width)),
        conv=whole.conv[own],
        conv_bias=at(whole.conv_bias, own),
        dt_bias=whole.dt_bias[own],
        A=whole.A[own],
        D=whole.D[own],
        bias=at(whole.bias, both),
        heads=len(heads),
    )


# ---- RG-LRU: by the blocks of its gates


def _rg_lru_units(mixer: RecurrentBlock, ranks: int) -> int:
    return len(mixer.gates)


def _rg_lru_cut(mixer: RecurrentBlock, units: Units) -> Mapping[str, Cut]:
    widths = times(units, len(mixer.conv) // len(mixer.gates))
    return {"conv": Cut(-1, (widths,)), "recurrent": Cut(0, (widths,))}


def _rg_lru_part(parts: MatrixParts, whole: RecurrentBlock, units: Units) -> RecurrentBlock:
    width = len(whole.conv) // len(whole.gates)
    blocks = span(units, parts.group.rank)
    own = features(blocks, width)
    both = torch.cat([own, len(whole.conv) + own])
    return replace(
        whole,
        project=parts.rows(whole.project, both),
        bias=whole.bias[both],
        out=parts.second(whole.out, times(units, width)),
        conv=whole.conv[own],
        conv_bias=whole.conv_bias[own],
        gates=[whole.gates[block] for block in blocks],
        gates_bias=whole.gates_bias[blocks],
        recurrent_param=whole.recurrent_param[own],
    )


# ---- RWKV: by channels. Each rank has the token before


def _wkv_units(mixer: TimeMix, ranks: int) -> int:
    return pieces(len(mixer.decay), ranks)


def _wkv_cut(mixer: TimeMix, units: Units) -> Mapping[str, Cut]:
    own = Cut(0, (times(units, len(mixer.decay) // sum(units)),))
    return {"numerator": own, "denominator": own, "peak": own}


def _wkv_part(parts: MatrixParts, whole: TimeMix, units: Units) -> TimeMix:
    widths = times(units, len(whole.decay) // sum(units))
    own = span(widths, parts.group.rank)
    return replace(
        whole,
        key=parts.rows(whole.key, own),
        value=parts.rows(whole.value, own),
        receptance=parts.rows(whole.receptance, own),
        out=parts.second(whole.out, widths),
        decay=whole.decay[own],
        bonus=whole.bonus[own],
    )


# ---- mLSTM: by heads


def _mlstm_units(mixer: MLSTM, ranks: int) -> int:
    return mixer.heads


def _mlstm_cut(mixer: MLSTM, units: Units) -> Mapping[str, Cut]:
    return {"recurrent": Cut(0, (units,)), "peak": Cut(0, (units,))}


def _mlstm_part(parts: MatrixParts, whole: MLSTM, units: Units) -> MLSTM:
    heads = span(units, parts.group.rank)
    q, v, all_keys = features(heads, whole.key_dim), features(heads, whole.value_dim), whole.widths[0]
    both = torch.cat([q, all_keys + q, 2 * all_keys + v, 2 * all_keys + whole.widths[2] + v])
    gates = torch.cat([heads, whole.heads + heads])
    return replace(
        whole,
        project=parts.rows(whole.project, both),
        gates=parts.rows(whole.gates, gates),
        gates_bias=whole.gates_bias[gates],
        out=parts.second(whole.out, times(units, whole.value_dim)),
        norm=replace(whole.norm, weight=whole.norm.weight[heads], bias=at(whole.norm.bias, heads)),
        heads=len(heads),
        bias=at(whole.bias, both),
    )


# ---- the short convolution: by channels


def _short_units(mixer: ShortConv, ranks: int) -> int:
    return pieces(len(mixer.conv), ranks)


def _short_cut(mixer: ShortConv, units: Units) -> Mapping[str, Cut]:
    return {"conv": Cut(-1, (times(units, len(mixer.conv) // sum(units)),))}


def _short_part(parts: MatrixParts, whole: ShortConv, units: Units) -> ShortConv:
    width = len(whole.conv)
    widths = times(units, width // sum(units))
    own = span(widths, parts.group.rank)
    three = torch.cat([own, width + own, 2 * width + own])
    return replace(
        whole,
        project=parts.rows(whole.project, three),
        out=parts.second(whole.out, widths),
        conv=whole.conv[own],
        conv_bias=at(whole.conv_bias, own),
        bias=at(whole.bias, three),
    )


# ---- lightning attention: by heads, under a norm of all of them


def _lightning_units(mixer: Lightning, ranks: int) -> int:
    return len(mixer.slope)


def _lightning_cut(mixer: Lightning, units: Units) -> Mapping[str, Cut]:
    return {"recurrent": Cut(0, (units,))}


def _lightning_part(parts: MatrixParts, whole: Lightning, units: Units) -> Lightning:
    heads, widths = span(units, parts.group.rank), times(units, whole.head_dim)
    own = features(heads, whole.head_dim)
    outputs = torch.cat([features(heads, 3 * whole.head_dim), 3 * whole.width + own])
    part = replace(
        whole,
        project=parts.rows(whole.project, outputs),
        out=parts.second(whole.out, widths),
        slope=whole.slope[heads],
    )
    return _as(LightningHeads, part, group=parts.group, widths=widths)


@dataclass(eq=False)
class LightningHeads(Lightning):
    """A part of lightning attention: the heads of one rank, of which each has `widths[rank]` features."""

    group: Gathering | None = None
    widths: Units = ()

    def normed(self, y: Tensor) -> Tensor:
        assert self.group is not None
        whole = super().normed(self.group.gather(y, self.widths))
        return whole.split(self.widths, dim=-1)[self.group.rank].contiguous()


def _as(kind: type[Any], part: Any, **more: Any) -> Any:
    """A mixer as one of a subclass, which has more fields."""
    return kind(**{each.name: getattr(part, each.name) for each in fields(part)}, **more)


RECURRENCES: Mapping[type, RecurrenceSplit] = {
    GatedDelta: RecurrenceSplit(_delta_units, _delta_cut, _delta_part),
    Mamba2: RecurrenceSplit(_mamba2_units, _mamba2_cut, _mamba2_part),
    Mamba: RecurrenceSplit(_mamba_units, _mamba_cut, _mamba_part),
    HeadedMamba: RecurrenceSplit(_headed_units, _headed_cut, _headed_part),
    RecurrentBlock: RecurrenceSplit(_rg_lru_units, _rg_lru_cut, _rg_lru_part),
    TimeMix: RecurrenceSplit(_wkv_units, _wkv_cut, _wkv_part),
    MLSTM: RecurrenceSplit(_mlstm_units, _mlstm_cut, _mlstm_part),
    ShortConv: RecurrenceSplit(_short_units, _short_cut, _short_part),
    Lightning: RecurrenceSplit(_lightning_units, _lightning_cut, _lightning_part),
}
"""By the types of their mixers."""
