"""Attention of new tokens over what their row has stored, ring or not.

No mask tensor is passed: what a query sees follows from where its row starts. A row's keys and values are in a ring,
position p in slot p % S, so the positions from `low` up to `end` are one contiguous range of slots, or two after a
wrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.attention.kv_store import append
from lmstate.ops.attention.rope import rope
from lmstate.ops.cuda import attention as cuda
from lmstate.ops.types.block_table import BLOCK_TOKENS, BlockTable, Stored, dense
from lmstate.ops.types.params import FULL_CAUSAL, AttentionParams, CausalMask, RopeTables
from lmstate.ops.types.slab_table import SlabTable

MOST = 512
"""New tokens a row that one native call takes: its memory grows with them, their results do not depend on it."""
BLOCK = 512
"""Queries that the reference handles at a time where each sees only a part of the row."""
FEW = 16
"""New tokens of rows that are attended to at once under a mask, as many keys for each row as the longest one has."""
SPARE = 1024
"""Positions that a row may hold less than another for nothing."""
EVERY = slice(None)
AT_ONCE = 1 << 26
"""Scores of rows that are attended to at once: 256 MiB, where they exist."""


def attend(
    q: Tensor,
    k: Stored,
    v: Stored,
    starts: Tensor,
    counts: Tensor,
    params: AttentionParams,
    mask: CausalMask = FULL_CAUSAL,
) -> Tensor:
    """Attend from new tokens to the stored ones; float32 `[R, T, H, Dv]`, zero where a query is padding.

    q: float32 `[R, T, H, D]`. k: `[R, K, S, D]`, v: `[R, K, S, Dv]`, rings that already hold the new tokens; H is a
    multiple of K. starts, counts: int64 `[R]`: query i < counts[r] of row r is at position starts[r] + i and sees
    of the positions up to its own those in `mask`.

    Where starts and counts are not on the host (another device, a traced graph), all S slots are read: those never
    written must be finite then.
    """
    library = dispatch.native(q, k, v, params.sinks)
    if library is not None and library.attention.can_attend(q, k, v):
        if q.shape[1] <= MOST:
            return library.attention.attend(q, k, v, starts, counts, params, mask)
        blocks = []
        for first, block in zip(range(0, q.shape[1], MOST), q.split(MOST, dim=1)):
            some, own = (counts - first).clamp(0, MOST), params.of(EVERY, slice(first, first + MOST))
            blocks.append(library.attention.attend(block, k, v, starts + first, some, own, mask))
        return torch.cat(blocks, dim=1)
    if dispatch.gpu(q, k, v, params.sinks) and cuda.can_read(k, v) and params.biases is None:
        return cuda.attend(q, cast(SlabTable, k), cast(SlabTable, v), starts, counts, params, mask)
    return attend_reference(q, k, v, starts, counts, params, mask)


def attend_reference(
    q: Tensor,
    k: Stored,
    v: Stored,
    starts: Tensor,
    counts: Tensor,
    params: AttentionParams,
    mask: CausalMask = FULL_CAUSAL,
) -> Tensor:
    """Plain torch in the dtype of k and v."""
    if torch.compiler.is_compiling() or not starts.is_cpu:
        return _attend_on_device(q, dense(k), dense(v), starts, counts, params, mask)
    spans, pieces = tuple(zip(starts.tolist(), counts.tolist())), []
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, params.sinks))
    few = isinstance(k, SlabTable) and not (params.reads_distance or tracked or k.requires_grad or v.requires_grad)
    for rows in rows_together(spans, q.shape[2] if few else 0):
        if len({spans[r] for r in rows}) > 1:
            assert isinstance(k, SlabTable) and isinstance(v, SlabTable)
            pieces.append(_attend_padded(q, k, v, rows, [spans[r] for r in rows], params, mask))
            continue
        start, count = spans[rows[0]]
        low = mask.first_visible(start)
        keys, values = (_span(x, rows, low, start + count, tracked) for x in (k, v))
        some = slice(rows.start, rows.stop)
        y = attend_span(q[some, :count], keys, values, start, low, params.of(some, slice(count)), mask)
        pieces.append(y if count == q.shape[1] else F.pad(y, (0, 0, 0, 0, 0, q.shape[1] - count)))
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else q.new_zeros(0, q.shape[1], q.shape[2], v.shape[3])


@lru_cache(maxsize=8)
def rows_together(spans: tuple[tuple[int, int], ...], heads: int) -> list[range]:
    """Rows that follow each other and are attended to at once: those that are alike, and where each operation is a
    launch those of few new tokens. Not where three quarters would be read for nothing, or where all scores of `heads`
    heads together would be more than `AT_ONCE`. heads: 0 where only rows that are alike go together."""
    found, first, longest, total, widest = [], 0, 0, 0, 0
    for r, (start, count) in enumerate(spans):
        length = start + count + SPARE
        longest, total, widest = max(longest, length), total + length, max(widest, count)
        read = longest * (r + 1 - first)
        near = 0 < heads * widest * read <= AT_ONCE and widest <= FEW and read <= 4 * total
        if spans[r] != spans[first] and not near:
            found.append(range(first, r))
            first, longest, total, widest = r, length, length, count
    return [*found, range(first, len(spans))] if spans else []


def _attend_padded(
    q: Tensor,
    k: SlabTable,
    v: SlabTable,
    rows: range,
    spans: Sequence[tuple[int, int]],
    params: AttentionParams,
    mask: CausalMask,
) -> Tensor:
    """Rows that follow each other at once, whatever they hold: `attend` of these."""
    seen = padded_view(tuple(spans), mask, k.dtype if params.plain else torch.bool, q.device)
    if not seen.width:
        return q.new_zeros(len(rows), *q.shape[1:3], v.shape[3])
    own = q[rows.start : rows.stop, : seen.width].transpose(1, 2).to(k.dtype)
    keys, values = (x.read(rows, seen.spans, seen.blocks) for x in (k, v))
    return seen.finished(params.softmax(own, keys, values, seen.visible).transpose(1, 2).float(), q.shape[1])


class PaddedView(NamedTuple):
    """Positions that the new tokens of some rows see, of as many blocks for each as the row has that holds most."""

    spans: tuple[range, ...]  # of each row, its blocks
    blocks: int  # the most of a row
    width: int  # T: the most new tokens
    visible: Tensor  # [n, 1, T, S], S positions from each row's own first block on: bool, or added to the scores
    padding: Tensor | None  # [n, T, 1, 1], which queries are padding

    def finished(self, y: Tensor, width: int) -> Tensor:
        """Results `[n, T, H, D]`, zero where a query is padding, as `[n, width, H, D]`."""
        y = y if self.padding is None else y.masked_fill(self.padding, 0)
        return y if self.width == width else F.pad(y, (0, 0, 0, 0, 0, width - self.width))


@lru_cache(maxsize=4)  # of a window and of none, for two lots of rows: each may take as much memory as a layer's keys
def padded_view(
    spans: tuple[tuple[int, int], ...], mask: CausalMask, dtype: torch.dtype, device: torch.device
) -> PaddedView:
    """Of rows by start and count, made once for the layers of a step that are alike."""
    held = tuple(
        range(mask.first_visible(start) // BLOCK_TOKENS, -(-(start + count) // BLOCK_TOKENS)) for start, count in spans
    )
    blocks = max(map(len, held))
    starts, counts, begins = (torch.tensor(each)[:, None] for each in (*zip(*spans), [each.start for each in held]))
    width = int(counts.max())
    offsets = torch.arange(width)
    stored = begins * BLOCK_TOKENS + torch.arange(blocks * BLOCK_TOKENS)
    padding = (offsets >= counts)[:, None, :, None]
    # Padding sees everything, so that its softmax is not of nothing.
    visible = mask.visible((starts + offsets)[:, None, :, None], stored[:, None, None]) | padding
    if dtype != torch.bool:
        visible = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -torch.inf)
    with torch.inference_mode(False):
        none = padding.transpose(1, 2).to(device) if padding.any() else None
        return PaddedView(held, blocks, width, visible.to(device), none)


def _span(x: Stored, rows: range, low: int, end: int, tracked: bool) -> Tensor:
    """The positions low..end of some rows, `[n, K, end - low, D]`."""
    if isinstance(x, BlockTable):
        return x.span(rows, low, end, tracked)
    return unroll(x[rows.start : rows.stop], low, end)


def attend_span(
    q: Tensor, k: Tensor, v: Tensor, start: int, low: int, params: AttentionParams, mask: CausalMask
) -> Tensor:
    """q `[R, T, H, D]` at positions start.., k and v `[R, K, L, D]` at positions low.. -> `[R, T, H, Dv]` float32."""
    count, end = q.shape[1], start + q.shape[1]
    if count == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3])
    q = q.transpose(1, 2).to(k.dtype)  # [R, H, T, D]
    if params.plain and mask.first_visible(end - 1) == low:
        return params.softmax(q, k, v, None).transpose(1, 2).float()
    blocks = []
    # In blocks of queries: a window's cost then grows with the window and not with the length, and so do the scores.
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        a, b = mask.first_visible(start + first), start + last  # the positions that this block sees
        own, stored = (
            torch.arange(start + first, start + last, device=q.device)[:, None],
            torch.arange(a, b, device=q.device),
        )
        visible = mask.visible(own, stored)
        keys, values = k[:, :, a - low : b - low], v[:, :, a - low : b - low]
        of_block = params.of(EVERY, slice(first, last))
        blocks.append(of_block.softmax(q[:, :, first:last], keys, values, visible, own - stored))
    return torch.cat(blocks, dim=2).transpose(1, 2).float()


def unroll(ring: Tensor, low: int, end: int) -> Tensor:
    """The positions low..end of a ring `[1, K, S, D]` in order: a view, or a copy where they wrap."""
    size = ring.shape[2]
    if low == end:
        return ring[:, :, :0]
    first, last = low % size, (end - 1) % size + 1
    if first < last:
        return ring[:, :, first:last]
    return torch.cat([ring[:, :, first:], ring[:, :, :last]], dim=2)


def _attend_on_device(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, counts: Tensor, params: AttentionParams, mask: CausalMask
) -> Tensor:
    """The same without reading starts and counts on the host: every slot takes part, under a mask `[R, 1, T, S]`."""
    slots = torch.arange(k.shape[2], device=q.device)
    newest = (starts + counts)[:, None] - 1  # [R, 1]
    stored = newest - (newest - slots) % k.shape[2]  # [R, S]: the newest position that is in each slot
    own = starts[:, None] + torch.arange(q.shape[1], device=q.device)  # [R, T]
    at, held = own[:, None, :, None], stored[:, None, None]
    visible = mask.visible(at, held)
    real = (torch.arange(q.shape[1], device=q.device) < counts[:, None])[:, :, None, None]  # [R, T, 1, 1]
    visible = visible | ~real.transpose(1, 2)  # padding sees everything, so that its softmax is not of nothing
    y = params.softmax(q.transpose(1, 2).to(k.dtype), k, v, visible, at - held)
    return y.transpose(1, 2).float().masked_fill(~real, 0)


def rotate_attend(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    rotation: RopeTables,
    k: Stored,
    v: Stored,
    starts: Tensor,
    counts: Tensor,
    params: AttentionParams,
    mask: CausalMask = FULL_CAUSAL,
) -> Tensor:
    """Rotate q `[R, T, H, D]` and k_new `[R, T, K, D]`, store k_new and v_new in the rings k and v, attend.

    The same as `rope`, `append` and `attend` one after the other; float32 `[R, T, H, Dv]`.
    """
    cos, sin, interleaved = rotation
    library = dispatch.native(q, k_new, v_new, k, v, params.sinks)
    if (
        library is not None
        and q.shape[1] <= MOST
        and library.attention.can_attend(q, k, v)
        and library.attention.can_append(k_new, v_new, k, v)
    ):
        return library.attention.rotate_attend(
            q, k_new, v_new, cos, sin, interleaved, k, v, starts, counts, params, mask
        )
    rotated, keys = rope(torch.cat([q, k_new], dim=2), cos, sin, interleaved).split([q.shape[2], k_new.shape[2]], dim=2)
    append(keys, v_new, k, v, starts, counts)
    return attend(rotated, k, v, starts, counts, params, mask)
