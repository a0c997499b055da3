"""Attention to chosen positions (DeepSeek Sparse Attention, 2512.02556).

Beside its latent a layer stores a small key of each token, its index. A query scores every key that it may see,
`sum over heads of weight_h relu(q_h . key)`, and attends to the `budget` positions of the largest scores. Of two that
are the same, the later position is chosen: sums of relus are often exactly zero, and a choice that depended on the
number of stored positions would depend on where the text was cut.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.attention.attend_latent import attend_latent
from lmstate.ops.cuda import attention as cuda
from lmstate.ops.cuda import chosen as cuda_chosen
from lmstate.ops.types.block_table import Stored, dense
from lmstate.ops.types.slab_table import SlabTable

SCORES = 1 << 24
"""Scores that exist at a time."""
GATHERED = 1 << 23
"""Numbers that are put side by side at a time."""


@torch.no_grad()
def choose_positions(
    q: Tensor, weights: Tensor, keys: Stored, starts: Tensor, counts: Tensor, budget: int, rate: int = 1
) -> Tensor:
    """The positions that new tokens attend to: int64 `[R, T, k]` in ascending order, then -1; k = min(budget, S).

    q              [R, T, Hi, Di]
    weights        [R, T, Hi]       float32, of each head's scores
    keys           [R, 1, S, Di]    blocks, or position p in slot p; new tokens are already stored
    starts, counts [R] int64        query i < counts[r] of row r is at position starts[r] + i and sees the positions
                                    up to its own
    rate                            tokens per key: a query sees the keys whose tokens all
                                    are before it, or are its own

    Natively, and on a GPU, a score is summed in one order, so that a choice is the same however the text is cut.
    """
    budget = min(budget, keys.shape[2])
    tokens = max(1, SCORES // max(q.shape[0] * keys.shape[2], 1))
    body = dispatch.native(q, weights, keys)
    native = body.choosing if body is not None and body.choosing.can_choose(q, keys, weights) else None
    on_gpu = native is None and q.dtype == torch.float32 and dispatch.gpu(q, weights, keys) and cuda.can_read(keys)
    parts = []
    for first in range(0, max(q.shape[1], 1), tokens):
        some, offsets = slice(first, first + tokens), (starts + first, (counts - first).clamp(0, tokens))
        if native is not None:
            parts.append(native.choose(q[:, some], weights[:, some], keys, *offsets, budget, rate))
        elif on_gpu:
            given = q[:, some], weights[:, some], cast(SlabTable, keys), *offsets
            parts.append(cuda_chosen.choose_positions(*given, budget, rate))
        else:
            parts.append(choose_positions_reference(q[:, some], weights[:, some], keys, *offsets, budget, rate))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def choose_positions_reference(
    q: Tensor, weights: Tensor, keys: Stored, starts: Tensor, counts: Tensor, budget: int, rate: int = 1
) -> Tensor:
    stored = dense(keys)[:, 0].to(q.dtype)  # [R, S, Di]
    size, device = stored.shape[1], stored.device
    scores = q.new_zeros(*q.shape[:2], size)
    for head in range(q.shape[2]):
        scores += weights[:, :, head, None] * (q[:, :, head] @ stored.mT).relu()
    offsets, places = torch.arange(q.shape[1], device=device), torch.arange(size, device=device)
    own = (starts.to(device)[:, None] + offsets)[..., None]  # [R, T, 1]
    hidden = (places >= (own + 1) // rate) | (offsets >= counts.to(device)[:, None])[..., None]
    # From the last position on: a stable sort keeps the order of those whose scores are the same.
    order = scores.masked_fill(hidden, float("-inf")).flip(-1).sort(dim=-1, descending=True, stable=True).indices
    chosen = size - 1 - order[..., : min(budget, size)]
    chosen = chosen.masked_fill(hidden.gather(-1, chosen), size).sort(dim=-1).values
    return chosen.masked_fill(chosen == size, -1)


def gather_positions(stored: Stored, places: Tensor, head: int = 0) -> Tensor:
    """Vectors of a head at positions int64 `[R, N]` of what is stored, `[R, K, S, D]` -> `[R, N, D]`; zeros at -1."""
    body = dispatch.native(stored)
    if body is not None:
        return body.choosing.gather(stored, places.contiguous(), head)
    held = dense(stored)[:, head]
    index = (places.clamp(min=0) % max(held.shape[1], 1)).to(held.device)[..., None]
    found = held.gather(1, index.expand(-1, -1, held.shape[2]))
    return found.masked_fill((places < 0).to(held.device)[..., None], 0)


def attend_chosen(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Stored,
    rope_key: Stored,
    chosen: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to chosen positions of stored latents -> float32 `[R, T, H, Lat]`, zero where none is chosen.

    q_latent, q_rope [R, T, H, Lat] and [R, T, H, Dr], as in `attend_latent`
    latent, rope_key [R, 1, S, Lat] and [R, 1, S, Dr]: blocks, or position p in slot p
    chosen           [R, T, k] int64, see `choose_positions`
    sinks            [H] float32, as in `attend_latent`

    They are put side by side, so that what is read and computed follows their number.
    """
    gpu = q_latent.dtype == torch.float32 and dispatch.gpu(q_latent, q_rope, latent, rope_key, sinks)
    if gpu and cuda.can_read_latents(latent, rope_key):
        held = cast(SlabTable, latent), cast(SlabTable, rope_key)
        return cuda_chosen.attend_chosen(q_latent, q_rope, *held, chosen, scale, sinks)
    if dispatch.native(q_latent, q_rope, latent, rope_key) is None:
        latent, rope_key = dense(latent), dense(rope_key)
    rows, width, heads, _ = q_latent.shape
    counts = (chosen >= 0).sum(-1)  # [R, T]
    parts = []
    tokens = max(1, GATHERED // max(rows * chosen.shape[2] * (latent.shape[3] + rope_key.shape[3]), 1))
    for first in range(0, max(width, 1), tokens):
        some = slice(first, first + tokens)
        picked, count = chosen[:, some].flatten(1), counts[:, some].flatten()
        both = [gather_positions(part, picked) for part in (latent, rope_key)]
        # A row of its own for each query, which is at the last of what it sees.
        both = [part.unflatten(1, (-1, chosen.shape[2])).flatten(0, 1) for part in both]  # [R * t, k, ..]
        query, query_rope = (q[:, some].flatten(0, 1)[:, None] for q in (q_latent, q_rope))
        starts, one = (count - 1).clamp(min=0), count.clamp(max=1)
        seen = attend_latent(query, query_rope, both[0], both[1], starts, one, scale=scale, sinks=sinks)
        parts.append(seen.view(rows, -1, heads, seen.shape[-1]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
