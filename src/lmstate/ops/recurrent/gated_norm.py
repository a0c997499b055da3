"""The RMS norm after a recurrence, and the gate that multiplies what goes in or what comes out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.cuda import recurrent as cuda
from lmstate.ops.types.params import Gate, Norm


def gated_norm(y: Tensor, gate: Tensor, norm: Norm, *, act: Gate = "silu", groups: int = 1, gate_last: bool) -> Tensor:
    """norm(y * act(gate)), or norm(y) * act(gate) if `gate_last`, over each of `groups` parts alone.

    y, gate  float32 [R, T, I]
    norm     of kind "rms" without bias; its weight is [I], or [I / groups] for every part alike

    Returns float32 [R, T, I].
    """
    library = dispatch.native(y, gate, norm.weight)
    if library is not None and all_float32(y, gate, norm.weight):
        return library.recurrent.gated_norm(y, gate, norm, act == "silu", groups, gate_last)
    known = all_float32(y, gate, norm.weight) and y.shape[-1] // groups <= cuda.WIDEST_GROUP
    if known and dispatch.gpu(y, gate, norm.weight):
        return cuda.gated_norm(y, gate, norm, act, groups, gate_last)
    return gated_norm_reference(y, gate, norm, act=act, groups=groups, gate_last=gate_last)


def gated(y: Tensor, gate: Tensor, act: Gate = "sigmoid") -> Tensor:
    """y * act(gate), float32 `[R, T, I]` both: a number's rounding does not depend on its place."""
    library = dispatch.native(y, gate)
    if library is not None and all_float32(y, gate):
        return library.recurrent.gated_norm(y, gate, None, act == "silu")
    if all_float32(y, gate) and y.shape[-1] <= cuda.WIDEST_GROUP and dispatch.gpu(y, gate):
        return cuda.gated_norm(y, gate, None, act)
    return y * (F.silu(gate) if act == "silu" else gate.sigmoid())


def gated_norm_reference(y: Tensor, gate: Tensor, norm: Norm, *, act: Gate, groups: int, gate_last: bool) -> Tensor:
    gate = F.silu(gate) if act == "silu" else gate.sigmoid()
    parts = (y if gate_last else y * gate).unflatten(-1, (groups, -1))  # [R, T, G, I / G]
    parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + norm.eps)
    normed = (parts * norm.weight.unflatten(0, (-1, parts.shape[-1]))).flatten(-2)
    return normed * gate if gate_last else normed
