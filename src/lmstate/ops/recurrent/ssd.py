"""The state space of Mamba-2 (state space duality): a decay a head, and B and C shared by groups of heads.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T        S [P, N] a head
    y_t = S_t C_t + D x_t

Dao and Gu, "Transformers are SSMs" (2405.21060). Within a chunk, y is masked attention with scores
C_i^T B_j exp(decay from j to i) dt_j; across chunks one product reads the carry and one writes it. Decays stay in log
space and only differences that are <= 0 are exponentiated.

`recurrent` and `chunked` know nothing of dt and A but a weight and a log decay a token and head: any recurrence of this
shape may use them.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.cuda import recurrent as cuda
from lmstate.ops.ragged import blank, carry_dtype, padding
from lmstate.ops.types.recurrences import SSDOperands

RECURRENT_UP_TO = 3
"""Steps of at most this many tokens run token by token. This and the sizes below are measured on H = 24, P = 64."""

CHUNK = 64
"""Tokens whose mutual scores are written out."""

SEGMENT = 4
"""Chunks whose scores are computed together: enough to batch, few enough for the cache."""

NEGLIGIBLE = -80.0
"""Log decays below this count as zero: near exp(-90) float32 numbers are denormal, and slow to compute with."""


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    carry: Tensor,
    counts: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """The Mamba-2 recurrence over T tokens of each row.

    x        [R, T, H, P]
    dt       [R, T, H]      raw: dt_bias, softplus and the limits are applied here, at every length of step alike
    A        [H]            negative: -exp(A_log)
    B, C     [R, T, G, N]   H is a multiple of G: head h reads group h // (H / G)
    D        [H] or None    the skip connection
    carry    [R, H, P, N]   float32 or float64
    counts   [R] int64

    Returns y [R, T, H, P] and the new carry, both in the carry's dtype.
    """
    dtype, width = carry_dtype(carry), x.shape[1]
    operands = SSDOperands(x, dt, A, B, C, D, carry, counts, dt_bias, dt_limits)
    library = dispatch.native(x, dt, A, B, C, D, carry, dt_bias)
    if library is not None and all_float32(x, dt, A, B, C, D, carry, dt_bias):
        return library.recurrent.ssd(operands)
    given = (x, dt, A, B, C, D, carry, dt_bias)
    if dispatch.gpu(*given) and all_float32(*given) and B.shape[3] <= cuda.WIDEST_KEY:
        return cuda.ssd(operands)
    mask = padding(counts, x)
    dt = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    dt = blank(F.softplus(dt).clamp(*dt_limits), mask)  # a weight of 0 and a decay of 1 make padding the identity
    x, B, C = (blank(each.to(dtype), mask) for each in (x, B, C))
    body = recurrent if width <= RECURRENT_UP_TO else chunked
    return body(x, dt, dt * A.to(dtype), B, C, None if D is None else D.to(dtype), carry)


def recurrent(
    x: Tensor, weight: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, D: Tensor | None, carry: Tensor
) -> tuple[Tensor, Tensor]:
    """S <- exp(log_decay) S + weight x B^T, y = S C + D x, token by token.

    x [R, T, H, P]; weight, log_decay [R, T, H]; B, C [R, T, G, N]; D [H] or None; carry [R, H, P, N]; all in one dtype.
    """
    groups = B.shape[2]
    decay = log_decay.exp()[..., None, None]
    value = (x * weight[..., None])[..., None].unflatten(2, (groups, -1))  # [R, T, G, J, P, 1]
    outputs = [x[:, :0]]
    for t in range(x.shape[1]):
        carry = (carry * decay[:, t]).unflatten(1, (groups, -1))  # [R, G, J, P, N]
        carry = torch.addcmul(carry, value[:, t], B[:, t, :, None, None]).flatten(1, 2)
        read = carry.unflatten(1, (groups, -1)).flatten(2, 3) @ C[:, t, :, :, None]  # [R, G, J * P, 1]
        outputs.append(read.reshape(x[:, :1].shape))
    y = torch.cat(outputs, 1)
    return y if D is None else torch.addcmul(y, x, D[:, None]), carry


def chunked(
    x: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    carry: Tensor,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk; as `recurrent`. The tokens left after the last whole chunk are one more chunk."""
    width = x.shape[1]
    whole = width - width % chunk
    segments = [(first, last, chunk) for first, last in pairwise([*range(0, whole, SEGMENT * chunk), whole])]
    if width > whole:
        segments.append((whole, width, width - whole))
    outputs = [x[:, :0]]
    for first, last, size in segments:
        inputs = tuple(each[:, first:last] for each in (x, weight, log_decay, B, C))
        y, carry = _segment(inputs, D, carry, size)
        outputs.append(y)
    return torch.cat(outputs, 1), carry


def _segment(inputs: tuple[Tensor, ...], D: Tensor | None, carry: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """x, weight, log_decay, B, C of M chunks of c = `size` tokens. Letters below: J = H // G heads a group."""
    x, weight, log_decay, B, C = (each.unflatten(1, (-1, size)).movedim(1, 0) for each in inputs)  # [M, R, c, ...]
    chunks, rows, _, heads, head_dim = x.shape
    groups = B.shape[3]
    B, C = (each.movedim(3, 2).reshape(chunks, rows * groups, size, -1) for each in (B, C))  # [M, R * G, c, N]
    # The sum is float64: the decay between two late tokens is a small difference of large sums.
    total = log_decay.double().cumsum(2)  # [M, R, c, H]
    since_start = total.exp().to(x.dtype)[..., None]  # [M, R, c, H, 1]
    to_end = (total[:, :, -1:] - total).exp().to(x.dtype)

    scores = (C @ B.mT).reshape(chunks, rows, groups, 1, size, size)
    scores = scores * _decay_between(total.mT, x.dtype).unflatten(2, (groups, -1))  # [M, R, G, J, c, c]
    scores = scores.flatten(2, 3) * weight.mT[..., None, :]  # [M, R, H, c, c]
    if D is not None:
        scores.diagonal(dim1=-2, dim2=-1).add_(D[:, None])
    y = (scores @ x.movedim(3, 2)).movedim(2, 3)  # [M, R, c, H, P]: what the chunk's own tokens say

    value = x * (weight * to_end)[..., None]  # [M, R, c, H, P]
    value = value.reshape(chunks, rows, size, groups, -1).movedim(3, 2).reshape(chunks, rows * groups, size, -1)
    keep = since_start[:, :, -1, :, :, None]  # [M, R, H, 1, 1]
    state = carry.reshape(rows * groups, -1, carry.shape[-1])  # [R * G, J * P, N]
    outputs = []
    for n in range(chunks):
        read = (C[n] @ state.mT).reshape(rows, groups, size, -1).movedim(2, 1)  # [R, c, G, J * P]
        outputs.append(torch.addcmul(y[n], read.reshape(rows, size, heads, head_dim), since_start[n]))
        state = (state.reshape(carry.shape) * keep[n]).reshape(state.shape).baddbmm_(value[n].mT, B[n])
    return torch.cat(outputs, 1), state.reshape(carry.shape)


def _decay_between(total: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(total[i] - total[j]) for j <= i, zero elsewhere: [..., c] -> [..., c, c]."""
    between = (total[..., :, None] - total[..., None, :]).to(dtype)
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).triu(1)
    return F.threshold(between.masked_fill_(later, float("-inf")), NEGLIGIBLE, float("-inf")).exp_()
