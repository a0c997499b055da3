"""Attention over slots in any order, each with a position of its own: what is left of a row after some were evicted."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.scoring import EVERYTHING, Scoring, Sight

SHORT = 32
"""Up to this many new tokens a row, the native body runs."""
BLOCK = 128
"""Queries that are scored at a time."""


def attend_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    starts: Tensor,
    counts: Tensor,
    scoring: Scoring,
    sight: Sight = EVERYTHING,
    last: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend from new tokens to the slots of their row and kv head -> float32 `[R, T, H, Dv]`, zero where padding.

    q: float32 `[R, T, H, D]`; k: `[R, K, S, D]`, v: `[R, K, S, Dv]`, which already hold the new tokens; positions:
    `[R, K, S]`, negative where a slot is empty. starts, counts: int64 `[R]`: query i < counts[r] stands at starts[r] +
    i and sees the slots of positions up to its own, of those in `sight`.

    `last`: also return the attention that each slot received, averaged over the query heads of its group, float32
    `[R, K, S, last + 1]`: first the sum over the queries before the last ones, then each of the last `last` of the row
    by itself (zeros where a row has fewer). Reads starts and counts on the host.
    """
    library = dispatch.native(q, k, v, scoring.sinks)
    if library is not None and q.shape[1] <= SHORT:
        from lmstate.ops.cpu.slots import slots

        if (body := slots(library.variant)).can(q, k, v):
            return body.attend(q, k, v, positions, starts, counts, scoring, sight, last)
    return attend_slots_reference(q, k, v, positions, starts, counts, scoring, sight, last)


def attend_slots_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    starts: Tensor,
    counts: Tensor,
    scoring: Scoring,
    sight: Sight = EVERYTHING,
    last: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Plain torch in float32; also the body for long steps."""
    rows, width, heads, _ = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    out = q.new_zeros(rows, width, heads, v.shape[-1], dtype=torch.float32)
    seen = None if last is None else q.new_zeros(rows, kv_heads, slots, last + 1, dtype=torch.float32)
    outs = []
    for r, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        keys, values, where = k[r].float(), v[r].float(), positions[r, :, None, None]  # where: [K, 1, 1, S]
        pieces = []
        for first in range(0, count, BLOCK):
            block = q[r, first : min(first + BLOCK, count)].float()  # [t, H, D]
            own = torch.arange(start + first, start + first + len(block), device=q.device)[:, None]  # [t, 1]
            probs = _weights(block, keys, where, own, scoring, sight)  # [K, G, t, S]
            read = probs.flatten(1, 2) @ values  # [K, G * t, Dv]
            pieces.append(read.unflatten(1, probs.shape[1:3]).permute(2, 0, 1, 3).flatten(1, 2))  # [t, H, Dv]
            if seen is not None and last is not None:
                _add_columns(seen[r], probs.detach().mean(1), first - (count - last))
        outs.append(torch.cat([*pieces, out[r, count:]]))
    return (torch.stack(outs) if rows else out), seen


def _weights(q: Tensor, k: Tensor, where: Tensor, own: Tensor, scoring: Scoring, sight: Sight) -> Tensor:
    """q `[t, H, D]` at positions own `[t, 1]`, k `[K, S, D]` at `where` -> softmax float32 `[K, G, t, S]`."""
    count, heads, _ = q.shape
    group = heads // len(k)
    grouped = q.view(count, len(k), group, -1).permute(1, 2, 0, 3).flatten(1, 2)  # [K, G * t, D]
    products = (grouped @ k.mT).view(1, heads, count, -1)
    mask = sight.sees(own, where).expand(-1, group, -1, -1).flatten(0, 1)  # [H, t, S]
    return scoring.weights(products, mask).view(len(k), group, count, -1)


def _add_columns(seen: Tensor, columns: Tensor, offset: int) -> None:
    """Add queries' attention `[K, t, S]` to seen `[K, S, last + 1]`; the first is number `offset` of the last."""
    early = min(max(-offset, 0), columns.shape[1])
    seen[..., 0] += columns[:, :early].sum(1)
    late = columns[:, early:].mT  # [K, S, n]
    begin = 1 + max(offset, 0)
    seen[..., begin : begin + late.shape[-1]] = late
