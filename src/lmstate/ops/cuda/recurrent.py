"""Recurrences, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops.cuda.device import launch, on_gpu, padded

SLICE = 32
"""Values, or lines of a state, that a program holds."""
CHANNELS = 128
WIDEST_KEY = 256


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, carry: Tensor, counts: Tensor, scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.gated_delta_rule`, or `ops.linear_attention` where beta is None; the arguments are those there."""
    from lmstate.ops.cuda.kernels import recurrent as kernels

    rows, width, heads, size = v.shape
    key_heads, key_dim = k.shape[2:]
    out, new = torch.zeros_like(v, memory_format=torch.contiguous_format), torch.empty_like(carry)
    if rows:
        q, k, v, g = (x.contiguous() for x in (q, k, v, g))
        launch(
            kernels.gated_delta_rule, (rows * heads, -(-size // SLICE)), q, k, v, g,
            g if beta is None else beta.contiguous(), carry.contiguous(), on_gpu(counts, v), out, new, width, scale,
            KEY_HEADS=key_heads, HEADS=heads, DK=key_dim, DKP=padded(key_dim), DV=size, SLICE=SLICE,
            BY_CHANNEL=g.dim() == v.dim(), NORMALIZE=normalize, CORRECTS=beta is not None,
        )  # fmt: skip
    return out, new


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, carry: Tensor, counts: Tensor,
    dt_bias: Tensor | None, dt_limits: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.ssd`; the arguments are those there."""
    from lmstate.ops.cuda.kernels import recurrent as kernels

    rows, width, heads, size = x.shape
    groups, states = B.shape[2:]
    out, new = torch.zeros_like(x, memory_format=torch.contiguous_format), torch.empty_like(carry)
    if rows:
        launch(
            kernels.ssd, (rows * heads, -(-size // SLICE)), x.contiguous(), dt.contiguous(),
            A if dt_bias is None else dt_bias, A, B.contiguous(),
            C.contiguous(), A if D is None else D, carry.contiguous(), on_gpu(counts, x), out, new, width,
            dt_limits[0], min(dt_limits[1], torch.finfo(torch.float32).max),
            GROUPS=groups, HEADS=heads, P=size, SLICE=SLICE, N=states, NP=padded(states), HAS_D=D is not None,
            HAS_BIAS=dt_bias is not None,
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
