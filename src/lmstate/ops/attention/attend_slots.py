"""Attention that tells what each slot received, and attention over slots in any order, each with its own position."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.types.params import FULL_CAUSAL, AttentionParams, AttentionSums, CausalMask

OBSERVED = 64
"""New tokens a row that one native call observes: the weights of them all are kept until the sums are known."""
BLOCK = 128
"""Queries that the reference scores at a time."""


def attend_observed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    counts: Tensor,
    params: AttentionParams,
    columns: AttentionSums,
) -> Tensor:
    """`ops.attend` over rings that have not wrapped; adds what each slot receives to `columns`."""
    library = dispatch.native(q, k, v, params.sinks, params.slopes, params.biases)
    if library is None or not library.attention.can_attend(q, k, v):
        slots = torch.arange(k.shape[2], device=k.device).expand(k.shape[:3])
        return attend_slots(q, k, v, slots, starts, counts, params, columns=columns)
    out = []
    for first, block in zip(range(0, max(q.shape[1], 1), OBSERVED), q.split(OBSERVED, dim=1)):
        own, some = params.of(slice(None), slice(first, first + OBSERVED)), (counts - first).clamp(0, OBSERVED)
        out.append(library.attention.attend(block, k, v, starts + first, some, own, FULL_CAUSAL, columns))
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def attend_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    starts: Tensor,
    counts: Tensor,
    params: AttentionParams,
    mask: CausalMask = FULL_CAUSAL,
    columns: AttentionSums | None = None,
) -> Tensor:
    """Attend from new tokens to the slots of their row and kv head -> float32 `[R, T, H, Dv]`, zero where padding.

    q: float32 `[R, T, H, D]`; k: `[R, K, S, D]`, v: `[R, K, S, Dv]`, which already hold the new tokens; positions:
    `[R, K, S]`, negative where a slot is empty. starts, counts: int64 `[R]`: query i < counts[r] is at starts[r] +
    i and sees the slots of positions up to its own, of those in `mask`. Adds to `columns` what each slot receives.

    Plain torch in float32; reads starts and counts on the host.
    """
    rows, width, heads, _ = q.shape
    padding = q.new_zeros(rows, width, heads, v.shape[-1], dtype=torch.float32)
    outs = []
    for r, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        keys, values, where = k[r].float(), v[r].float(), positions[r, :, None, None]  # where: [K, 1, 1, S]
        pieces = []
        for first in range(0, count, BLOCK):
            block = q[r, first : min(first + BLOCK, count)].float()  # [t, H, D]
            own = torch.arange(start + first, start + first + len(block), device=q.device)[:, None]  # [t, 1]
            of_block = params.of(slice(r, r + 1), slice(first, first + len(block)))
            probs = _weights(block, keys, where, own, of_block, mask)  # [K, G, t, S]
            read = probs.flatten(1, 2) @ values  # [K, G * t, Dv]
            pieces.append(read.unflatten(1, probs.shape[1:3]).permute(2, 0, 1, 3).flatten(1, 2))  # [t, H, Dv]
            if columns is not None:
                sums = columns.sums[r]  # [K, n, S]
                plane = (own[:, 0] + sums.shape[1] - columns.ends[r]).clamp(min=0)
                sums.index_add_(1, plane, probs.detach().mean(1))
        outs.append(torch.cat([*pieces, padding[r, count:]]))
    return torch.stack(outs) if rows else padding


def _weights(q: Tensor, k: Tensor, where: Tensor, own: Tensor, params: AttentionParams, mask: CausalMask) -> Tensor:
    """q `[t, H, D]` at positions own `[t, 1]`, k `[K, S, D]` at `where` -> softmax float32 `[K, G, t, S]`."""
    count, heads, _ = q.shape
    group = heads // len(k)
    grouped = q.view(count, len(k), group, -1).permute(1, 2, 0, 3).flatten(1, 2)  # [K, G * t, D]
    products = (grouped @ k.mT).view(1, heads, count, -1)
    visible = mask.visible(own, where).expand(-1, group, -1, -1).flatten(0, 1)  # [H, t, S]
    distance = (own - where).expand(-1, group, -1, -1).flatten(0, 1)
    return params.weights(products, visible, distance).view(len(k), group, count, -1)
