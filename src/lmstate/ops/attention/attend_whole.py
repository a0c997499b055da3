"""Attention without an order: every query of a row sees all that the row has stored."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.attention.attend import attend
from lmstate.ops.types.block_table import Stored
from lmstate.ops.types.params import AttentionParams


def attend_whole(
    q: Tensor,
    k: Stored,
    v: Stored,
    lengths: Tensor,
    counts: Tensor,
    params: AttentionParams,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend to the first `lengths[r]` of what row r has stored; float32 `[R, T, H, Dv]`, of no meaning at padding.

    q: float32 `[R, T, H, D]`. k: `[R, K, S, D]`, v: `[R, K, S, Dv]`. lengths, counts: int64 `[R]` on the host; a row
    without queries may have stored nothing. params: scale and softcap alone. bias: float32 `[H, T, S]`, added to the
    scores, where all rows have S.

    A native body takes the queries of a row as heads of one token at the last position: they see all positions, and no
    head's result depends on the other heads.
    """
    tokens, kv_heads = q.shape[1], k.shape[1]
    library = dispatch.native(q, k, v, bias)
    if library is None or not library.attention.can_attend(q, k, v):
        return attend_whole_reference(q, k, v, lengths, counts, params, bias)
    if bias is not None:  # by how far a key is before the last position
        grouped = bias.unflatten(0, (kv_heads, -1)).transpose(1, 2)  # [K, T, H / K, S]
        params = params._replace(biases=grouped.flip(-1).flatten(0, 2))
    seen = attend(as_heads(q, kv_heads), k, v, (lengths - 1).clamp(min=0), counts.clamp(max=1), params)
    return as_tokens(seen, tokens, kv_heads)


def as_heads(q: Tensor, kv_heads: int) -> Tensor:
    """Queries `[R, T, H, D]` as those of one token with T times as many heads `[R, 1, K * T * H / K, D]`."""
    return q.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(1, 3)[:, None]


def as_tokens(seen: Tensor, tokens: int, kv_heads: int) -> Tensor:
    """Return the output of attention by the heads of `as_heads`, `[R, 1, H * T, D]`, by tokens: `[R, T, H, D]`."""
    return seen.flatten(0, 1).unflatten(1, (kv_heads, tokens, -1)).transpose(1, 2).flatten(2, 3)


def attend_whole_reference(
    q: Tensor,
    k: Stored,
    v: Stored,
    lengths: Tensor,
    counts: Tensor,
    params: AttentionParams,
    bias: Tensor | None = None,
) -> Tensor:
    """Plain torch in the dtype of k and v."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    group = q.shape[2] // k.shape[1]
    for r, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist())):
        if not count:
            continue
        keys, values = (_first(x, r, length).repeat_interleave(group, dim=0) for x in (k, v))  # [H, S, D]
        scores = (q[r, :count].transpose(0, 1).to(keys.dtype) @ keys.mT).float() * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        if bias is not None:
            scores = scores + bias[:, :count]
        out[r, :count] = (scores.softmax(-1).to(values.dtype) @ values).transpose(0, 1).float()
    return out


def _first(x: Stored, row: int, length: int) -> Tensor:
    """The first positions of a row, `[K, length, D]`."""
    if isinstance(x, Tensor):
        return x[row, :, :length]
    return x.span(range(row, row + 1), 0, length)[0]
