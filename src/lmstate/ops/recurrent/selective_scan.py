"""The selective scan of Mamba-1: a state of N numbers a channel, each with its own decay.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t          h [N] a channel
    y_t = C_t^T h_t + D x_t

Gu and Dao, "Mamba" (2312.00752). Every channel and state number decays by its own rate, so no matrix product covers a
chunk as in Mamba-2: long steps run chunks side by side instead (`_scan`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.cuda import recurrent as cuda
from lmstate.ops.ragged import blank, carry_dtype, padding
from lmstate.ops.recurrent.scan import scan, split
from lmstate.ops.types.recurrences import SelectiveScanOperands

RECURRENT_UP_TO = 8
"""Steps of at most this many tokens run token by token; measured on F = 1536, N = 16."""

PIECE = 36
"""Tokens that `chunked` expands to [R, PIECE, N, F] at a time: three such tensors are its memory, whatever T is."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    carry: Tensor,
    counts: Tensor,
    *,
    softplus: bool = False,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The Mamba-1 recurrence over T tokens of each row.

    x, dt   [R, T, F]   dt >= 0, its bias and softplus applied; or, with `softplus`, before that is
    A       [F, N]      negative: -exp(A_log)
    B, C    [R, T, N]
    D       [F] or None: the skip connection
    carry   [R, F, N]   float32 or float64
    counts  [R] int64

    gate    [R, T, F] or None: y is multiplied by silu(gate)

    Returns y [R, T, F] and the new carry, both in the carry's dtype.
    """
    dtype, width = carry_dtype(carry), x.shape[1]
    operands = SelectiveScanOperands(x, dt, A, B, C, D, carry, counts, softplus, gate)
    given = (x, dt, A, B, C, D, carry, gate)
    library = dispatch.native(*given)
    if library is not None and all_float32(*given):
        return library.recurrent.selective_scan(operands)
    if dispatch.gpu(*given) and all_float32(*given) and A.shape[1] <= cuda.WIDEST_STATE:
        return cuda.selective_scan(operands)
    dt = F.softplus(dt) if softplus else dt
    mask = padding(counts, x)
    x, dt, B, C = (blank(each.to(dtype), mask) for each in (x, dt, B, C))  # dt = 0 makes padding the identity
    body = recurrent if width <= RECURRENT_UP_TO else chunked
    y, carry = body(x, dt, A.to(dtype), B, C, None if D is None else D.to(dtype), carry)
    return (y if gate is None else y * F.silu(gate)), carry


def recurrent(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, carry: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token; as `selective_scan`, without padding and in one dtype."""
    value = (dt * x)[..., None]  # [R, T, F, 1]
    outputs = [x[:, :0]]
    for t in range(x.shape[1]):
        carry = torch.addcmul(carry * torch.exp(dt[:, t, :, None] * A), value[:, t], B[:, t, None])
        outputs.append((carry @ C[:, t, :, None]).mT)  # [R, 1, F]
    y = torch.cat(outputs, 1)
    return y if D is None else torch.addcmul(y, x, D), carry


def chunked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, carry: Tensor, *, piece: int = PIECE
) -> tuple[Tensor, Tensor]:
    """Chunks side by side; as `recurrent`. Inside, channels are the last axis, the elementwise one."""
    rates, state = A.t().contiguous(), carry.mT  # [N, F], [R, N, F]
    value = dt * x
    outputs = [x[:, :0]]
    for first, last, size in split(x.shape[1], piece):
        span = (each[:, first:last].unflatten(1, (-1, size)) for each in (dt, value, B, C))  # [R, n, L, F or N]
        span_dt, span_value, span_B, span_C = span
        decay = torch.exp(span_dt[..., None, :] * rates)  # [R, n, L, N, F]
        states, state = scan(decay, span_value[..., None, :] * span_B[..., None], state)
        reads = [span_C[:, :, i, None] @ h for i, h in enumerate(states)]  # [R, n, 1, F] each
        outputs.append(torch.cat(reads, 2).flatten(1, 2))
    y = torch.cat(outputs, 1)
    return y if D is None else torch.addcmul(y, x, D), state.mT.contiguous()
