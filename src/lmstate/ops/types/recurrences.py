"""Operands of the recurrences: an operation hands them to its native bodies as one value."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaOperands(NamedTuple):
    """Of `ops.gated_delta_rule`; without `beta` of `ops.linear_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    carry: Tensor
    counts: Tensor
    scale: float
    normalize: bool


class SSDOperands(NamedTuple):
    """Of `ops.ssd`."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    carry: Tensor
    counts: Tensor
    dt_bias: Tensor | None
    dt_limits: tuple[float, float]


class SelectiveScanOperands(NamedTuple):
    """Of `ops.selective_scan`."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    carry: Tensor
    counts: Tensor
    softplus: bool
    gate: Tensor | None


class RGLRUOperands(NamedTuple):
    """Of `ops.rg_lru`; `h` and `seen` are its carry."""

    x: Tensor
    input_gate: Tensor
    recurrence_gate: Tensor
    recurrent_param: Tensor
    h: Tensor
    seen: Tensor
    counts: Tensor
