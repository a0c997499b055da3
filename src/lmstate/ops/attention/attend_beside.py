"""Attention to a window of keys and to chosen entries beside it, all of which are values too (DeepSeek-V4)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.attention.attend_latent import attend_latent
from lmstate.ops.attention.choose import gather_positions
from lmstate.ops.cuda import attention as cuda
from lmstate.ops.cuda import chosen as cuda_chosen
from lmstate.ops.types.block_table import Stored
from lmstate.ops.types.slab_table import SlabTable

GATHERED = 1 << 23
"""Numbers that are put side by side at a time."""


def attend_beside(
    q: Tensor,
    keys: Stored,
    entries: Stored,
    chosen: Tensor,
    starts: Tensor,
    counts: Tensor,
    *,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from new tokens to the last positions and to chosen entries -> float32 `[R, T, H, D]`, zero at padding.

    q              [R, T, H, D]     float32
    keys           [R, 1, S, D]     blocks or rings of the last positions, new tokens are already stored
    entries        [R, 1, S', D]    blocks, or entry e in slot e
    chosen         [R, T, k] int64  entries, then -1
    starts, counts [R] int64        query i < counts[r] of row r is at position starts[r] + i and sees the last
                                    `window` positions up to its own
    sinks          [H] float32      see `ops.AttentionParams`

    They are put side by side, the positions first, so that what is read and computed follows their number.
    """
    gpu = q.dtype == torch.float32 and keys.dtype == entries.dtype and dispatch.gpu(q, keys, entries, sinks)
    if gpu and cuda.can_read_latents(keys, entries):
        slabs = cast(SlabTable, keys), cast(SlabTable, entries)
        return cuda_chosen.attend_beside(q, *slabs, chosen, starts, counts, window, scale, sinks)
    rows, width, heads, dim = q.shape
    device = chosen.device
    window = min(window, max([1, *(starts + counts).tolist()]))  # no memory for what no row has
    starts, counts = starts.to(device)[:, None], counts.to(device)[:, None]
    offsets, places, parts = torch.arange(width, device=device), torch.arange(window, device=device), []
    tokens = max(1, GATHERED // max(rows * (window + chosen.shape[2]) * dim, 1))
    for first in range(0, max(width, 1), tokens):
        some = slice(first, first + tokens)
        own = torch.minimum(starts + offsets[some], starts + counts - 1)  # [R, t]; padding is there too
        near = (own - window + 1).clamp(min=0)[..., None] + places  # [R, t, window]
        picked = chosen[:, some]
        queries = q[:, some].flatten(0, 1)[:, None]  # a row of its own for each query
        held = gather_positions(keys, near.masked_fill(near > own[..., None], -1).flatten(1))
        beside = gather_positions(entries, picked.flatten(1))
        both = torch.cat([held.view(len(queries), window, dim), beside.view(len(queries), -1, dim)], dim=1)
        # Close to the start of a text there are fewer positions than the window has: the entries move up.
        count = (own + 1).clamp(max=window).flatten()[:, None]  # [R * t, 1]
        if bool((count < window).any()) and picked.shape[2]:
            order = torch.arange(both.shape[1], device=device)
            order = torch.where(order < count, order, (order + window - count).clamp(max=both.shape[1] - 1))
            both = both.gather(1, order.to(both.device)[..., None].expand(-1, -1, dim))
        seen = count[:, 0] + (picked >= 0).sum(-1).flatten()
        real = (offsets[some] < counts).flatten().long()
        nothing = both.new_zeros(*both.shape[:2], 0)
        found = attend_latent(
            queries,
            queries[..., :0],
            both,
            nothing,
            (seen - 1).clamp(min=0).cpu(),
            real.cpu(),
            scale=scale,
            sinks=sinks,
        )
        parts.append(found.view(rows, -1, heads, dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
