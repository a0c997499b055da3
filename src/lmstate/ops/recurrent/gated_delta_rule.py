"""The gated delta rule: a matrix that forgets by a gate and corrects what it would have answered.

    S  <-  diag(exp g_t) S                         forget       (g_t one number a head: GDN; one a key channel: KDA)
    S  <-  S + k_t (beta_t (v_t - k_t^T S))^T      correct the answer to k_t towards v_t
    o_t =  scale * q_t^T S

Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2412.06464); the gate a channel is Kimi Linear's (2510.26692). beta up
to 2 gives the negative eigenvalues of 2411.12537.

Within a chunk of c tokens the corrections depend on each other linearly. Let A be the strictly lower [c, c] matrix of
beta_i k_i^T k_j, decayed from j to i. The corrected values U solve (I + A) U = beta (V - K_in S). So a chunk costs a
few matrix products and one triangular inverse that does not depend on S. Decays stay in log space, and only differences
that are <= 0 are exponentiated: nothing overflows, and nothing is divided by a decay.
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
from lmstate.ops.types.recurrences import DeltaOperands

RECURRENT_UP_TO = 3
"""Steps of at most this many tokens run token by token. This and the sizes below are measured on H = 16, D = 128."""

CHUNK = 32
"""Tokens that are solved together."""

SEGMENT = 8
"""Chunks whose products that need no carry are computed together: enough to batch, few enough for the cache."""

CHANNEL_BLOCK = 4
"""With a gate a channel: tokens whose mutual decays are written out, a channel each; farther ones factorise."""

NEGLIGIBLE = -80.0
"""Log decays below this count as zero: near exp(-90) float32 numbers are denormal, and slow to compute with."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    carry: Tensor,
    counts: Tensor,
    *,
    scale: float,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over T tokens of each row.

    q, k    [R, T, Hk, Dk]   H is a multiple of Hk: head h reads q and k of head h // (H / Hk)
    v       [R, T, H, Dv]
    g       [R, T, H] or [R, T, H, Dk], log decay, <= 0
    beta    [R, T, H]
    carry   [R, H, Dk, Dv]   float32 or float64
    counts  [R] int64
    normalize: q and k are divided by sqrt(|x|^2 + 1e-6) first, as the published models do

    Returns the outputs [R, T, H, Dv] and the new carry, both in the carry's dtype.
    """
    dtype, width = carry_dtype(carry), q.shape[1]
    operands = DeltaOperands(q, k, v, g, beta, carry, counts, scale, normalize)
    library = dispatch.native(q, k, v, g, beta, carry)
    if library is not None and all_float32(q, k, v, g, beta, carry):
        return library.recurrent.gated_delta_rule(operands)
    if dispatch.gpu(q, k, v, g, beta, carry) and all_float32(q, k, v, g, beta, carry) and k.shape[3] <= cuda.WIDEST_KEY:
        return cuda.gated_delta_rule(operands)
    mask = padding(counts, v)
    q, k, v, g, beta = (blank(x.to(dtype), mask) for x in (q, k, v, g, beta))
    body = recurrent if width <= RECURRENT_UP_TO else chunked
    return body(q, k, v, g, beta, carry, scale=scale, normalize=normalize)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, carry: Tensor, *, scale: float, normalize: bool = False
) -> tuple[Tensor, Tensor]:
    """Token by token; as `gated_delta_rule`, without padding and in one dtype."""
    groups = v.shape[2] // k.shape[2]
    kq = torch.stack([k, q], -2)  # [R, T, Hk, 2, Dk]: both read the carry, which is then passed over once
    if normalize:
        kq = kq * _inverse_length(kq)
    if groups > 1:
        kq = kq.repeat_interleave(groups, 2)
    decay = g.exp().reshape(*g.shape[:3], -1)  # [R, T, H, 1 or Dk]
    reading = kq * decay[..., None, :]
    hits = (kq[..., 0, :] * kq[..., 1, :]).sum(-1, keepdim=True)  # [R, T, H, 1]: q_t^T k_t
    outputs = [v[:, :0]]
    for t in range(v.shape[1]):
        read = reading[:, t] @ carry  # [R, H, 2, Dv]
        delta = beta[:, t, :, None] * (v[:, t] - read[..., 0, :])  # [R, H, Dv]
        carry = torch.addcmul(carry * decay[:, t, :, :, None], kq[:, t, :, 0, :, None], delta[:, :, None])
        outputs.append((read[..., 1, :] + hits[:, t] * delta)[:, None])
    return torch.cat(outputs, 1) * scale, carry


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    carry: Tensor,
    *,
    scale: float,
    normalize: bool = False,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk; as `recurrent`. The tokens left after the last whole chunk are one more chunk."""
    width = v.shape[1]
    rest = width % chunk
    inputs = (q, k, v, g, beta)
    segments = [*range(0, width - rest, SEGMENT * chunk), width - rest]
    pieces = [(tuple(x[:, first:last] for x in inputs), chunk) for first, last in pairwise(segments)]
    if rest:
        # A gate a channel halves its chunks: there the last one is filled up with tokens that are the identity.
        size = rest if g.dim() < v.dim() else 1 << (rest - 1).bit_length()
        pieces.append((tuple(_extend(x[:, width - rest :], size) for x in inputs), size))
    outputs = [v[:, :0]]
    for piece, size in pieces:
        out, carry = _segment(piece, carry, scale=scale, normalize=normalize, size=size)
        outputs.append(out)
    return torch.cat(outputs, 1)[:, :width], carry


def _extend(x: Tensor, width: int) -> Tensor:
    """x [R, T, ...] with zeros after its tokens, up to `width`."""
    missing = width - x.shape[1]
    return x if missing == 0 else torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)


def _segment(
    inputs: tuple[Tensor, ...], carry: Tensor, *, scale: float, normalize: bool, size: int
) -> tuple[Tensor, Tensor]:
    """q, k, v, g, beta of N chunks of c = `size` tokens. Letters below: B = R * H heads, J = H // Hk."""
    q, k, v, g, beta = (_by_chunk(x, size) for x in inputs)  # [N, R, Hk or H, c, ...]
    rows, heads = v.shape[1:3]
    chunks, _, key_heads, _, key_dim = k.shape
    kq = torch.stack([k, q], 3)  # [N, R, Hk, 2, c, Dk]
    # What normalizes k and q joins the decays below, which multiply them anyway: [N, R, Hk, 2, c, 1].
    unit = _inverse_length(kq) if normalize else kq.new_ones(*kq.shape[:-1], 1)
    # The sum is float64: the decay between two late tokens is a small difference of large sums.
    log_decay = g.double().cumsum(3)  # [N, R, H, c] or [N, R, H, c, Dk]
    pairs = _decayed_products_by_channel if g.dim() == v.dim() else _decayed_products
    products = pairs(kq, unit, log_decay)  # k_i^T k_j and q_i^T k_j, j <= i
    products = products.reshape(chunks, rows * heads, 2, size, size)

    beta = beta.reshape(chunks, -1, size, 1)
    identity = torch.eye(size, dtype=v.dtype, device=v.device).expand(chunks, rows * heads, size, size)
    solve = torch.linalg.solve_triangular(products[:, :, 0] * beta, identity, upper=False, unitriangular=True)
    solve = solve * beta.mT  # [N, B, c, c]: (I + A)^-1 diag(beta)
    scores = products[:, :, 1] * scale

    log_decay = log_decay if g.dim() == v.dim() else log_decay[..., None]
    since_start = log_decay.exp().to(v.dtype).unflatten(2, (key_heads, -1))  # [N, R, Hk, J, c, 1 or Dk]
    to_end = (log_decay[..., -1:, :] - log_decay).exp().to(v.dtype).unflatten(2, (key_heads, -1))
    kq, unit = kq[:, :, :, None], unit[:, :, :, None]  # [N, R, Hk, 1, 2, c, Dk or 1]
    reading = (kq * (unit * since_start[..., None, :, :])).reshape(chunks, -1, 2 * size, key_dim)  # [N, B, 2c, Dk]
    writing = (kq[..., 0, :, :] * (unit[..., 0, :, :] * to_end)).reshape(chunks, -1, size, key_dim).mT  # [N, B, Dk, c]
    keep = since_start[..., -1, :].reshape(chunks, rows * heads, -1, 1)  # [N, B, 1 or Dk, 1]
    v = v.reshape(chunks, rows * heads, size, -1)

    state = carry.reshape(rows * heads, key_dim, -1)
    outputs = []
    for n in range(chunks):
        read = reading[n] @ state  # [B, 2c, Dv]
        update = solve[n] @ (v[n] - read[:, :size])  # [B, c, Dv]
        outputs.append(torch.baddbmm(read[:, size:], scores[n], update, beta=scale))
        state = (state * keep[n]).baddbmm_(writing[n], update)
    out = torch.stack(outputs).reshape(chunks, rows, heads, size, -1).permute(1, 0, 3, 2, 4)
    return out.reshape(rows, chunks * size, heads, -1), state.reshape(carry.shape)


def _by_chunk(x: Tensor, size: int) -> Tensor:
    """[R, N * size, H, ...] -> [N, R, H, size, ...], a view."""
    return x.unflatten(1, (-1, size)).movedim(1, 0).movedim(3, 2)


def _inverse_length(x: Tensor) -> Tensor:
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() + 1e-6)


def _decay_between(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(log_decay[i] - log_decay[j]) for j <= i, zero elsewhere: [..., c, x] -> [..., c (i), c (j), x]."""
    between = (log_decay[..., :, None, :] - log_decay[..., None, :, :]).to(dtype)
    later = torch.ones(between.shape[-3:-1], dtype=torch.bool, device=between.device).triu(1)
    return F.threshold(between.masked_fill_(later[:, :, None], float("-inf")), NEGLIGIBLE, float("-inf")).exp_()


def _decayed_products(kq: Tensor, unit: Tensor, log_decay: Tensor) -> Tensor:
    """k_i^T k_j and q_i^T k_j of unit-length k and q, times the decay from j to i, for j <= i.

    kq [N, R, Hk, 2, c, Dk], unit [N, R, Hk, 2, c, 1], log_decay [N, R, H, c] -> [N, R, Hk, J, 2, c, c]
    """
    products = (kq.flatten(3, 4) @ kq[:, :, :, 0].mT).unflatten(3, (2, -1))  # [N, R, Hk, 2, c, c]: once a key head
    products = products * unit * unit[:, :, :, :1].mT
    decay = _decay_between(log_decay[..., None], kq.dtype)[..., 0].unflatten(
        2, (kq.shape[2], -1)
    )  # [N, R, Hk, J, c, c]
    return products[:, :, :, None] * decay[..., None, :, :]


def _decayed_products_by_channel(kq: Tensor, unit: Tensor, log_decay: Tensor) -> Tensor:
    """Products as in `_decayed_products`, with a decay a channel: log_decay [N, R, H, c, Dk]."""
    kq = (kq * unit).repeat_interleave(log_decay.shape[2] // kq.shape[2], 2)  # each head decays in its own way
    return _products_by_channel(kq, log_decay)


def _products_by_channel(kq: Tensor, log_decay: Tensor) -> Tensor:
    """kq [..., 2, c, Dk], log_decay [..., c, Dk] -> [..., 2, c, c]; c is a power of two.

    From the later half to the earlier one, the decay factorises at the border into (j to there) * (there to i), both
    <= 1: a matrix product. The halves are smaller cases of the same, down to a size that is written out.
    """
    size, dtype = kq.shape[-2], kq.dtype
    if size <= CHANNEL_BLOCK:
        reach = _decay_between(log_decay, dtype) * kq[..., 0, None, :, :]  # [..., i, j, Dk]: k_j as it is at i
        return (kq.movedim(-3, -2) @ reach.mT).movedim(-2, -3)
    halves = kq.unflatten(-2, (2, -1)).movedim(-3, -4)  # [..., 2 halves, 2, c/2, Dk]
    earlier, later = log_decay.unflatten(-2, (2, -1)).unbind(-3)  # [..., c/2, Dk]
    border = later[..., :1, :]
    since = halves[..., 1, :, :, :] * (later - border).exp().to(dtype)[..., None, :, :]
    until = halves[..., 0, 0, :, :] * (border - earlier).exp().to(dtype)
    across = since @ until.mT[..., None, :, :]  # [..., 2, c/2, c/2]
    inside = _products_by_channel(halves, torch.stack([earlier, later], -3))
    first, second = inside.unbind(-4)
    upper = torch.cat([first, torch.zeros_like(first)], -1)
    return torch.cat([upper, torch.cat([across, second], -1)], -2)
