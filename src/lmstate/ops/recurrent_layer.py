"""A layer of a recurrent mixer as one operation, from the stream and back to it.

Each gives bit for bit what its operations give one after the other, and None where no one body does it all: a longer
step, a gradient to follow, another device, an unusual norm.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.cpu.recurrent_layers import layers
from lmstate.ops.cpu.recurrent_mixers import Carry
from lmstate.ops.gated_norm import Gate
from lmstate.ops.linear import few_rows
from lmstate.ops.norm import Norm
from lmstate.ops.residual import Residual
from lmstate.ops.weight import Weight


class Folded(NamedTuple):
    """What a layer gives: the stream, and what its state is to keep."""

    y: Tensor  # float32 [R, T, E]
    inputs: Tensor  # [R, T, F], of the fold
    carry: Carry


class DeltaParts(Protocol):
    """What a layer of the gated delta rule is made of; see `GatedDelta` for shapes, `delta_mixer` for the rest."""

    qkvz: Weight
    gates: Weight
    out: Weight
    conv: Tensor
    A: Tensor
    dt_bias: Tensor
    norm: Norm
    key_heads: int
    key_dim: int
    gate_act: Gate
    beta_scale: float


class StateSpaceNorm(Protocol):
    """The norm between a state space and its last projection; see `gated_norm`."""

    @property
    def norm(self) -> Norm: ...
    @property
    def groups(self) -> int: ...
    @property
    def gate_last(self) -> bool: ...


class StateSpaceParts(Protocol):
    """What a layer of Mamba-2 is made of; see `Mamba2` for the shapes and `ssd_mixer` for the rest."""

    project: Weight
    bias: Tensor | None
    out: Weight
    out_bias: Tensor | None
    conv: Tensor
    conv_bias: Tensor | None
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    groups: int
    head_dim: int
    dt_limits: tuple[float, float]

    @property
    def norm(self) -> StateSpaceNorm | None: ...


def delta_layer(
    x: Tensor, parts: DeltaParts, carry: Carry, counts: Tensor, *, norm: Norm | None, residual: Residual | None
) -> Folded | None:
    """Norm x `[R, T, E]`, project, `delta_mixer`, project back and add."""
    stream = None if residual is None else residual.stream
    tensors = (x, *carry, parts.conv, parts.A, parts.dt_bias, parts.norm.weight)
    library = dispatch.native(*tensors, parts.qkvz.storage, parts.out.storage, stream)
    if library is None or not (few_rows(x) and all_float32(*tensors) and _simple(norm, residual)):
        return None
    return Folded(*layers(library).delta(x, parts, carry, counts, norm, residual))


def ssd_layer(
    x: Tensor, parts: StateSpaceParts, carry: Carry, counts: Tensor, *, norm: Norm | None, residual: Residual | None
) -> Folded | None:
    """Norm x `[R, T, E]`, project, `ssd_mixer`, project back and add."""
    stream = None if residual is None else residual.stream
    tensors = (x, *carry, parts.conv, parts.conv_bias, parts.A, parts.D, parts.dt_bias)
    library = dispatch.native(*tensors, parts.project.storage, parts.out.storage, stream)
    if library is None or not (few_rows(x) and all_float32(*tensors) and _simple(norm, residual)):
        return None
    return Folded(*layers(library).ssd(x, parts, carry, counts, norm, residual))


def _simple(*before_and_after: Norm | Residual | None) -> bool:
    return all(each is None or each.simple for each in before_and_after)
