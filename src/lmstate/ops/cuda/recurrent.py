"""Recurrences, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops.cuda.configs import GATED_DELTA, SSD
from lmstate.ops.cuda.device import launch, on_gpu, padded
from lmstate.ops.types.params import Norm
from lmstate.ops.types.recurrences import DeltaOperands, RGLRUOperands, SelectiveScanOperands, SSDOperands

CHANNELS = 128
WIDEST_KEY = 256
STATES = 1024
"""Numbers of the states of channels that a program holds, at most."""
WIDEST_STATE = 256
WIDEST_GROUP = 1 << 16


def gated_delta_rule(operands: DeltaOperands) -> tuple[Tensor, Tensor]:
    """`ops.gated_delta_rule`, or `ops.linear_attention` where beta is None."""
    from lmstate.ops.cuda.kernels import recurrent as kernels

    q, k, v, g, beta, carry, counts, scale, normalize = operands
    rows, width, heads, size = v.shape
    key_heads, key_dim = k.shape[2:]
    out, new = torch.zeros_like(v, memory_format=torch.contiguous_format), torch.empty_like(carry)
    if rows:
        q, k, v, g = (x.contiguous() for x in (q, k, v, g))
        launch(
            kernels.gated_delta_rule, (rows * heads, -(-size // GATED_DELTA.rows)), q, k, v, g,
            g if beta is None else beta.contiguous(), carry.contiguous(), on_gpu(counts, v), out, new, width, scale,
            KEY_HEADS=key_heads, HEADS=heads, DK=key_dim, DKP=padded(key_dim), DV=size,
            SLICE=GATED_DELTA.rows, BY_CHANNEL=g.dim() == v.dim(), NORMALIZE=normalize, CORRECTS=beta is not None,
            warps=GATED_DELTA.warps,
        )  # fmt: skip
    return out, new


def ssd(operands: SSDOperands) -> tuple[Tensor, Tensor]:
    """`ops.ssd`."""
    from lmstate.ops.cuda.kernels import recurrent as kernels

    x, dt, A, B, C, D, carry, counts, dt_bias, dt_limits = operands
    rows, width, heads, size = x.shape
    groups, states = B.shape[2:]
    out, new = torch.zeros_like(x, memory_format=torch.contiguous_format), torch.empty_like(carry)
    if rows:
        launch(
            kernels.ssd, (rows * heads, -(-size // SSD.rows)), x.contiguous(), dt.contiguous(),
            A if dt_bias is None else dt_bias, A, B.contiguous(),
            C.contiguous(), A if D is None else D, carry.contiguous(), on_gpu(counts, x), out, new, width,
            dt_limits[0], min(dt_limits[1], torch.finfo(torch.float32).max),
            GROUPS=groups, HEADS=heads, P=size, SLICE=SSD.rows, N=states, NP=padded(states), HAS_D=D is not None,
            HAS_BIAS=dt_bias is not None, warps=SSD.warps,
        )  # fmt: skip
    return out, new


def causal_conv(
    x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """`ops.causal_conv` of kernels of two taps or more; the arguments are those there."""
    from lmstate.ops.cuda.kernels import recurrent as kernels

    rows, width, channels = x.shape
    out, new = torch.zeros_like(x, memory_format=torch.contiguous_format), torch.empty_like(tail)
    if rows:
        launch(
            kernels.causal_conv, (rows, -(-channels // CHANNELS)), x.contiguous(), tail.contiguous(),
            weight.contiguous(), weight if bias is None else bias, on_gpu(counts, x), out, new, width, channels,
            TAPS=weight.shape[1], SLICE=CHANNELS, HAS_BIAS=bias is not None, SILU=silu,
        )  # fmt: skip
    return out, new


def selective_scan(operands: SelectiveScanOperands) -> tuple[Tensor, Tensor]:
    """`ops.selective_scan`."""
    from lmstate.ops.cuda.kernels import recurrent as kernels

    x, dt, A, B, C, D, carry, counts, softplus, gate = operands
    rows, width, channels = x.shape
    states = A.shape[1]
    size = STATES // padded(states)
    out, new = torch.zeros_like(x, memory_format=torch.contiguous_format), torch.empty_like(carry)
    if rows:
        launch(
            kernels.selective_scan, (rows, -(-channels // size)), x.contiguous(), dt.contiguous(), A.contiguous(),
            B.contiguous(), C.contiguous(), A if D is None else D, x if gate is None else gate.contiguous(),
            carry.contiguous(), on_gpu(counts, x), out, new, width, channels, N=states, NP=padded(states), SLICE=size,
            HAS_D=D is not None, HAS_GATE=gate is not None, SOFTPLUS=softplus,
        )  # fmt: skip
    return out, new


def rg_lru(operands: RGLRUOperands) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`ops.rg_lru`."""
    from lmstate.ops.cuda.kernels import recurrent as kernels

    x, input_gate, recurrence_gate, param, h, seen, counts = operands
    rows, width, channels = x.shape
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    new, new_seen = torch.empty_like(h), torch.empty_like(seen)
    if rows:
        launch(
            kernels.rg_lru, (rows, -(-channels // CHANNELS)), x.contiguous(), input_gate.contiguous(),
            recurrence_gate.contiguous(), param, h.contiguous(), seen.contiguous(), on_gpu(counts, x), out, new,
            new_seen, width, channels, SLICE=CHANNELS,
        )  # fmt: skip
    return out, (new, new_seen)


def wkv(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, carry: tuple[Tensor, Tensor, Tensor], counts: Tensor,
    nothing: float,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """`ops.wkv`; the arguments are those there."""
    from lmstate.ops.cuda.kernels import recurrent as kernels

    rows, width, channels = k.shape
    out = torch.zeros_like(k, memory_format=torch.contiguous_format)
    num, den, peak = (torch.empty_like(part) for part in carry)
    if rows:
        launch(
            kernels.wkv, (rows, -(-channels // CHANNELS)), k.contiguous(), v.contiguous(), decay, bonus,
            *(part.contiguous() for part in carry), on_gpu(counts, k), out, num, den, peak, width, channels, nothing,
            SLICE=CHANNELS,
        )  # fmt: skip
    return out, (num, den, peak)


def running_peaks(kept: Tensor, added: Tensor, peak: Tensor) -> Tensor:
    """`ops.recurrent.scan.running_peaks` with a carry of float32; the arguments are those there."""
    from lmstate.ops.cuda.kernels import recurrent as kernels

    rows, width = kept.shape[:2]
    out = torch.empty_like(kept, memory_format=torch.contiguous_format)
    if out.numel():
        channels = out[0, 0].numel()
        launch(
            kernels.running_peaks, (rows, -(-channels // CHANNELS)), kept.contiguous(), added.contiguous(),
            peak.contiguous(), out, width, channels, SLICE=CHANNELS,
        )  # fmt: skip
    return out


def gated_norm(
    y: Tensor, gate: Tensor, norm: Norm | None, act: str, groups: int = 1, gate_last: bool = False
) -> Tensor:
    """`ops.gated_norm`, or `ops.gated` where norm is None; the arguments are those there."""
    from lmstate.ops.cuda.kernels import recurrent as kernels

    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    tokens, width = y.numel() // y.shape[-1], y.shape[-1] // groups
    weight, eps = (y, 0.0) if norm is None else (norm.weight, norm.eps)
    launch(
        kernels.gated_norm, (tokens, groups), y.contiguous(), gate.contiguous(), weight, out, width, groups,
        len(weight) // width, eps, ACT=act, NORMS=norm is not None, GATE_LAST=gate_last, WIDTH=padded(width),
    )  # fmt: skip
    return out
