"""Attention over compressed latents (MLA) that are never expanded to keys and values.

With k_h = [W_h c ; r] and v_h = U_h c for a stored latent c and a rope key r that all heads share, the score of head h
is (W_h^T q_nope)^T c + q_rope^T r. Its output is U_h times the weighted sum of the latents. So the mixer folds W_h into
the query and U_h into the output, and every head attends to the same [S, Lat] and [S, Dr]. DeepSeek-V2 (2405.04434).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.attention.attend import AT_ONCE, FEW, padded_view, rows_together
from lmstate.ops.attention.attend_slots import attend_slots
from lmstate.ops.cuda import attention as cuda
from lmstate.ops.types.block_table import BLOCK_TOKENS, BlockTable, Stored
from lmstate.ops.types.params import AttentionParams, AttentionSums, CausalMask
from lmstate.ops.types.slab_table import SlabTable

STORED_BLOCK = 1024
"""Stored tokens that are scored at a time."""

MOST = 32
"""New tokens a row that one native call takes: it leaves a sum of latents for every head and piece of the row."""

SCORES = 1 << 21
"""Scores that exist at a time: a block of queries is as long as this allows. Of few queries on a device where each
operation is a launch, `attend.AT_ONCE`."""


def attend_latent(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Stored,
    rope_key: Stored,
    starts: Tensor,
    counts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    columns: AttentionSums | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from new tokens to stored latents, whose sum weighted by softmax(scores * scale) comes back.

    q_latent       [R, T, H, Lat]   queries without rope, through the key up-projection
    q_rope         [R, T, H, Dr]    queries with rope
    latent         [R, S, Lat]      ring: position p of a row is in slot p % S; new tokens are already stored.
                                    Or blocks of one head
    rope_key       [R, S, Dr]       ring or blocks, as latent
    starts, counts [R] int64        query i < counts[r] of row r is at position starts[r] + i and sees the positions
                                    up to its own, the last `window` of them where that is given. S is at least what
                                    the queries of a row see together.
    columns        of a ring `[R, 1, n, S]` that has not wrapped: what each slot receives, averaged over the heads, is
                   added to it
    sinks          [H] float32: a logit a head that takes part in the softmax and has no latent

    Returns float32 [R, T, H, Lat] (float64 for float64 queries), zero at padded queries. Of a ring only what is seen is
    read; where starts and counts are not on the host (another device, a traced graph), all of it.
    """
    library, params = dispatch.native(q_latent, q_rope, latent, rope_key, sinks), AttentionParams(scale, sinks=sinks)
    headed, headed_rope = (x if isinstance(x, BlockTable) else x[:, None] for x in (latent, rope_key))
    if library is not None and library.attention.can_attend_latent(q_latent, q_rope, headed, headed_rope):
        body, blocks = library.attention, []
        for first in range(0, max(q_latent.shape[1], 1), MOST):
            block, block_rope = q_latent[:, first : first + MOST], q_rope[:, first : first + MOST]
            count = (counts - first).clamp(0, MOST)
            blocks.append(
                body.attend_latent(
                    block, block_rope, headed, headed_rope, starts + first, count, params, window, columns
                )
            )
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
    on_gpu = columns is None and dispatch.gpu(q_latent, q_rope, latent, rope_key, sinks)
    if on_gpu and cuda.can_read_latents(latent, rope_key):
        slabs, rope_slabs = cast(SlabTable, latent), cast(SlabTable, rope_key)
        return cuda.attend_latent(q_latent, q_rope, slabs, rope_slabs, starts, counts, scale, window, sinks)
    if columns is not None:
        assert isinstance(latent, Tensor) and isinstance(rope_key, Tensor)
        q, k = torch.cat([q_latent, q_rope], dim=-1), torch.cat([latent, rope_key], dim=-1)[:, None]
        slots = torch.arange(k.shape[2], device=k.device).expand(k.shape[:3])
        return attend_slots(q, k, latent[:, None], slots, starts, counts, params, CausalMask(window), columns)
    return attend_latent_reference(
        q_latent, q_rope, latent, rope_key, starts, counts, scale=scale, window=window, sinks=sinks
    )


def attend_latent_reference(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Stored,
    rope_key: Stored,
    starts: Tensor,
    counts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    tracked = torch.is_grad_enabled() and (q_latent.requires_grad or q_rope.requires_grad)
    dtype = torch.promote_types(q_latent.dtype, torch.float32)
    q_latent, q_rope = q_latent.to(dtype) * scale, q_rope.to(dtype) * scale
    if torch.compiler.is_compiling() or not starts.is_cpu:
        return _attend_on_device(
            q_latent, q_rope, _headless(latent), _headless(rope_key), starts, counts, window, sinks
        )
    spans = tuple(zip(starts.tolist(), counts.tolist()))
    scores = q_latent.shape[1] * q_latent.shape[2] * (max(map(sum, spans), default=0) + BLOCK_TOKENS)  # of a row
    few = q_latent.shape[1] <= FEW and scores <= AT_ONCE and not (tracked or latent.requires_grad) and sinks is None
    if few and isinstance(latent, SlabTable) and isinstance(rope_key, SlabTable) and not rope_key.requires_grad:
        most, found = max(1, AT_ONCE // max(scores, 1)), []
        for rows in rows_together(spans, q_latent.shape[2]):
            for first in range(rows.start, rows.stop, most):
                some = range(first, min(first + most, rows.stop))
                found.append(_attend_padded(q_latent, q_rope, latent, rope_key, some, spans, window))
        return torch.cat(found)
    latent, rope_key = _headless(latent), _headless(rope_key)
    whole = []
    for r, (start, count) in enumerate(spans):
        blocks = []
        size = max(1, SCORES // (STORED_BLOCK * q_latent.shape[2]))
        for first in range(0, count, size):
            last = min(first + size, count)
            block = (q_latent[r][first:last], q_rope[r][first:last])
            blocks.append(_attend_block(*block, latent[r], rope_key[r], start + first, window, sinks))
        blocks.append(q_latent.new_zeros(q_latent.shape[1] - count, *q_latent.shape[2:]))
        whole.append(torch.cat(blocks))
    return torch.stack(whole)


def _headless(x: Stored) -> Tensor:
    """Rings `[R, S, D]`."""
    return x.dense()[:, 0] if isinstance(x, BlockTable) else x


def _attend_padded(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: SlabTable,
    rope_key: SlabTable,
    rows: range,
    spans: Sequence[tuple[int, int]],
    window: int | None,
) -> Tensor:
    """Rows that follow each other at once, whatever they hold. Queries come scaled."""
    here = slice(rows.start, rows.stop)
    seen = padded_view(tuple(spans[here]), CausalMask(window), q_latent.dtype, q_latent.device)
    if not seen.width:
        return torch.zeros_like(q_latent[here])
    stored, turned = (x.read(rows, seen.spans, seen.blocks)[:, 0].to(q_latent.dtype) for x in (latent, rope_key))
    queries, turning = (q[here, : seen.width].flatten(1, 2) for q in (q_latent, q_rope))  # [n, T * H, ...]
    scores = torch.baddbmm(turning @ turned.mT, queries, stored.mT).unflatten(1, (seen.width, -1))
    weights = (scores + seen.visible.transpose(1, 2)).softmax(-1)  # [n, T, H, S]
    read = (weights.flatten(1, 2) @ stored).unflatten(1, (seen.width, -1))
    return seen.finished(read, q_latent.shape[1])


def _attend_block(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    start: int,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Queries [t, H, ...] at positions start, start + 1, ... of one row over its rings, one stored block after another.

    Kept between blocks for an exact softmax: the largest score so far, the sum of exponentials and the
    weighted sum of latents, both relative to it.
    """
    count, heads, width = q_latent.shape
    queries = q_latent.reshape(count * heads, -1), q_rope.reshape(count * heads, -1)
    own = torch.arange(start, start + count, device=q_latent.device)[:, None, None]
    low = 0 if window is None else max(0, start - window + 1)
    # Finite, so that a query which sees nothing of its first blocks subtracts no infinities.
    largest = q_latent.new_full((count, heads, 1), torch.finfo(q_latent.dtype).min)
    total, read = torch.zeros_like(largest), torch.zeros_like(q_latent)
    if sinks is not None:  # as if seen first
        largest, total = sinks.to(q_latent.dtype)[:, None].expand_as(largest), torch.ones_like(largest)
    for first, last in _spans(low, start + count, latent.shape[0]):
        slots = slice(first % latent.shape[0], first % latent.shape[0] + last - first)
        stored = latent[slots].to(q_latent.dtype)  # [s, Lat]
        scores = queries[0] @ stored.mT + queries[1] @ rope_key[slots].to(q_latent.dtype).mT
        scores = scores.view(count, heads, -1)
        position = torch.arange(first, last, device=own.device)
        if last - 1 > start:
            scores = scores.masked_fill(position > own, float("-inf"))
        if window is not None and first <= start + count - 1 - window:
            scores = scores.masked_fill(position <= own - window, float("-inf"))
        # The shift cancels in the result: it needs no gradient.
        highest = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
        shrink, weights = (largest - highest).exp(), (scores - highest).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        read = read * shrink + (weights.flatten(0, 1) @ stored).view(count, heads, width)
        largest = highest
    return read / total


def _attend_on_device(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Without reading starts and counts on the host: every slot is scored, under a mask. Queries come scaled."""
    width, size = q_latent.shape[1], latent.shape[1]
    offsets, slots = torch.arange(width, device=latent.device), torch.arange(size, device=latent.device)
    newest = (starts + counts)[:, None] - 1  # [R, 1]
    position = (newest - (newest - slots) % size)[:, None]  # [R, 1, S]: the newest position in each slot
    own = (starts[:, None] + offsets)[:, :, None]  # [R, T, 1]
    sees = (position >= 0) & (position <= own)
    if window is not None:
        sees = sees & (position > own - window)
    real = (offsets < counts[:, None])[:, :, None]  # [R, T, 1]
    latent, rope_key = latent[:, None].to(q_latent.dtype), rope_key[:, None].to(q_latent.dtype)  # [R, 1, S, ...]
    scores = q_latent @ latent.mT + q_rope @ rope_key.mT  # [R, T, H, S]
    # Padding sees everything, so that its softmax is not of nothing.
    scores = scores.masked_fill(~(sees | ~real)[:, :, None], float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat([scores, sinks[:, None].expand_as(scores[..., :1])], dim=-1).softmax(-1)[..., :-1]
    return (weights @ latent).masked_fill(~real[..., None], 0)


def _spans(low: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Positions low .. end cut where a ring of `size` slots wraps, and into blocks."""
    while low < end:
        last = min(end, low + STORED_BLOCK, low - low % size + size)
        yield low, last
        low = last
