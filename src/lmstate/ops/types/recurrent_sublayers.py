"""Recurrent layers as halves of blocks, from the stream and back to it.

Each gives bit for bit what its operations give one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from lmstate.ops.cpu import fused_recurrent
from lmstate.ops.cpu.fused_recurrent import Recurrence
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.types.params import Gate, Norm
from lmstate.ops.types.sublayers import Sublayer, simple, tensors_of
from lmstate.ops.types.weight import Weight

if TYPE_CHECKING:
    from lmstate.ops.cpu import Library


Carry = tuple[Tensor, ...]


class Folded(NamedTuple):
    """What a layer's state is to keep."""

    inputs: Tensor  # [R, T, F], of the fold
    carry: Carry


class DeltaParts(Protocol):
    """What a layer of the gated delta rule is made of; see `GatedDelta` for shapes, `delta_mixer` for the rest."""

    @property
    def qkvz(self) -> Weight: ...
    @property
    def gates(self) -> Weight: ...
    @property
    def out(self) -> Weight: ...
    @property
    def conv(self) -> Tensor: ...
    @property
    def A(self) -> Tensor: ...
    @property
    def dt_bias(self) -> Tensor: ...
    @property
    def norm(self) -> Norm: ...
    @property
    def key_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def gate_act(self) -> Gate: ...
    @property
    def beta_scale(self) -> float: ...


class StateSpaceNorm(Protocol):
    """The norm between a state space and its last projection; see `gated_norm`."""

    @property
    def norm(self) -> Norm: ...
    @property
    def groups(self) -> int: ...
    @property
    def gate_last(self) -> bool: ...


class ConvParts(Protocol):
    """What a gated short convolution is made of; see `ShortConv` for the shapes."""

    @property
    def project(self) -> Weight: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def out(self) -> Weight: ...
    @property
    def out_bias(self) -> Tensor | None: ...
    @property
    def conv(self) -> Tensor: ...
    @property
    def conv_bias(self) -> Tensor | None: ...


class StateSpaceParts(ConvParts, Protocol):
    """What a layer of Mamba-2 is made of; see `Mamba2` for the shapes and `ssd_mixer` for the rest."""

    @property
    def A(self) -> Tensor: ...
    @property
    def D(self) -> Tensor: ...
    @property
    def dt_bias(self) -> Tensor: ...
    @property
    def groups(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dt_limits(self) -> tuple[float, float]: ...
    @property
    def norm(self) -> StateSpaceNorm | None: ...
    @property
    def scale(self) -> Tensor | None: ...


class RecurrentSublayer(Sublayer[Recurrence]):
    """A layer whose mixer is a fold."""


@dataclass(eq=False)
class GatedDeltaSublayer(RecurrentSublayer):
    """`stream + scale * after(out(delta_mixer(qkvz(norm(x)), gates(norm(x)))))`."""

    parts: DeltaParts
    norm: Norm | None = None
    after: Norm | None = None
    scale: float = 1.0

    @cached_property
    def ends(self) -> tuple[Weight, Weight]:
        return self.parts.qkvz, self.parts.out

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        return self.parts.qkvz, self.parts.gates, self.parts.out

    @cached_property
    def others(self) -> list[Tensor]:
        p = self.parts
        return tensors_of(self.norm, self.after, p.conv, p.A, p.dt_bias, p.norm)

    def pack(self, library: Library) -> Recurrence | None:
        p = self.parts
        known = simple(self.norm, self.after) and _in_place(p.conv, p.A, p.dt_bias, p.norm.weight)
        return fused_recurrent.delta(self) if known else None


@dataclass(eq=False)
class Mamba2Sublayer(RecurrentSublayer):
    """`stream + scale * after(out(ssd_mixer(project(norm(x)))))`."""

    parts: StateSpaceParts
    norm: Norm | None = None
    after: Norm | None = None
    scale: float = 1.0
    parallel: bool = False
    """As in `MLPSublayer`."""

    @cached_property
    def ends(self) -> tuple[Weight, Weight]:
        return self.parts.project, self.parts.out

    @cached_property
    def others(self) -> list[Tensor]:
        p = self.parts
        gated = None if p.norm is None else p.norm.norm
        own = p.bias, p.scale, p.out_bias, p.conv, p.conv_bias, p.A, p.D, p.dt_bias, gated
        return tensors_of(self.norm, self.after, *own)

    def pack(self, library: Library) -> Recurrence | None:
        p = self.parts
        known = simple(self.norm, self.after) and _in_place(p.conv, p.conv_bias, p.A, p.D, p.dt_bias)
        return fused_recurrent.ssd(self) if known else None


@dataclass(eq=False)
class ShortConvSublayer(RecurrentSublayer):
    """`stream + scale * after(out(c * conv(b * x)))` with b | c | x = `project(norm(stream))`."""

    parts: ConvParts
    norm: Norm | None = None
    after: Norm | None = None
    scale: float = 1.0

    @cached_property
    def ends(self) -> tuple[Weight, Weight]:
        return self.parts.project, self.parts.out

    @cached_property
    def others(self) -> list[Tensor]:
        p = self.parts
        return tensors_of(self.norm, self.after, p.bias, p.out_bias, p.conv, p.conv_bias)

    def pack(self, library: Library) -> Recurrence | None:
        known = simple(self.norm, self.after) and _in_place(self.parts.conv, self.parts.conv_bias)
        return fused_recurrent.conv(self) if known else None


def _in_place(conv: Tensor, *others: Tensor | None) -> bool:
    """Whether the bodies read these as they are; see `tap_major`."""
    return all_float32(conv, *others) and conv.t().is_contiguous()
