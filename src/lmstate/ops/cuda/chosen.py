"""The choice of positions by their scores, and attention to vectors that were chosen, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops.cuda import configs
from lmstate.ops.cuda.attention import Addresses, attend_addresses, elements
from lmstate.ops.cuda.device import launch, on_gpu, padded
from lmstate.ops.types.block_table import BLOCK_TOKENS
from lmstate.ops.types.params import FULL_CAUSAL, AttentionParams
from lmstate.ops.types.slab_table import SlabTable

HIDDEN = -2139095041
"""The upper half of the rank of a score of minus infinity; see `kernels.chosen.ranks`."""


def choose_positions(
    q: Tensor, weights: Tensor, keys: SlabTable, starts: Tensor, counts: Tensor, budget: int, rate: int
) -> Tensor:
    """`ops.attention.choose.choose_positions` of index keys in slabs; the arguments are those there.

    No two ranks are equal, so whatever finds the largest finds the same.
    """
    from lmstate.ops.cuda.kernels import chosen as kernels

    rows, width, heads, size = q.shape
    table = keys.addresses()
    stored = table.shape[1] * BLOCK_TOKENS
    ranks = torch.empty(rows, width, stored, dtype=torch.int64, device=q.device)
    if ranks.numel():
        lines, warps, stages, _ = configs.attention(width, size)
        launch(
            kernels.ranks, (rows, -(-width // lines), table.shape[1]), q.contiguous(), weights.contiguous(), table,
            ranks, on_gpu(starts, q), on_gpu(counts, q), width, rate, HEADS=heads, ROWS=lines, D=size, DP=padded(size),
            ELEMENT=elements()[keys.dtype], PRECISION="ieee" if keys.dtype == torch.float32 else "tf32", warps=warps,
            stages=stages,
        )  # fmt: skip
    best = ranks.topk(min(budget, stored), dim=-1, sorted=False).values
    places = (best & 0xFFFFFFFF).masked_fill(best >> 32 == HIDDEN, stored).sort(dim=-1).values
    return places.masked_fill(places == stored, -1)


def vectors(stored: SlabTable, places: Tensor, heads: Tensor | int = 0) -> Tensor:
    """Addresses of a head's vectors at places int64 `[R, ...]`; 0 where a place is negative. heads: one for all, or
    int64 of a shape like that of `places`."""
    at = places.clamp(min=0)
    blocks = stored.addresses().gather(1, (at // BLOCK_TOKENS).flatten(1)).view_as(at)
    bytes_ = stored.width * stored.dtype.itemsize
    return (blocks + (at % BLOCK_TOKENS * stored.heads + heads) * bytes_).masked_fill((places < 0) | (blocks == 0), 0)


def attend_chosen(
    q_latent: Tensor, q_rope: Tensor, latent: SlabTable, rope_key: SlabTable, chosen: Tensor, scale: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`ops.attention.choose.attend_chosen` of latents in slabs; the arguments are those there."""
    keys, turned = (vectors(x, chosen).flatten(0, 1) for x in (latent, rope_key))
    stored = Addresses(keys, None, latent.dtype, 1, latent.width, turned, listed=True)
    return _attend_lists(q_latent, q_rope, stored, AttentionParams(scale, sinks=sinks))


def attend_beside(
    q: Tensor, keys: SlabTable, entries: SlabTable, chosen: Tensor, starts: Tensor, counts: Tensor, window: int,
    scale: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`ops.attention.attend_beside` of keys and entries in slabs; the arguments are those there.

    A list has room for a whole window in front of the entries, whatever is stored: a query's list is its own.
    """
    offsets = torch.arange(q.shape[1], device=q.device)
    begins, sizes = on_gpu(starts, q)[:, None, None], on_gpu(counts, q)[:, None, None]
    near = begins + offsets[:, None] - window + 1 + torch.arange(window, device=q.device)  # [R, T, window]
    near = near.masked_fill((near < 0) | (offsets[:, None] >= sizes), -1)
    lists = torch.cat([vectors(keys, near), vectors(entries, chosen)], dim=-1).flatten(0, 1)
    stored = Addresses(lists, None, keys.dtype, 1, keys.width, listed=True)
    return _attend_lists(q, None, stored, AttentionParams(scale, sinks=sinks))


def attend_blocks(
    q: Tensor, k: SlabTable, v: SlabTable, chosen: Tensor, starts: Tensor, counts: Tensor, params: AttentionParams,
    size: int,
) -> Tensor:  # fmt: skip
    """`ops.attention.attend_blocks` of keys and values in slabs; the arguments are those there."""
    width, groups = chosen.shape[1:3]
    own = on_gpu(starts, q)[:, None] + torch.arange(width, device=q.device)
    places = chosen[..., None] * size + torch.arange(size, device=q.device)  # [R, T, J, k, size]
    behind = places > own[:, :, None, None, None]
    places = places.masked_fill((chosen[..., None] < 0) | behind, -1).flatten(3)
    heads = (torch.arange(groups, device=q.device) * k.heads // groups)[:, None]  # [J, 1]
    keys, values = (vectors(x, places, heads).flatten(0, 2) for x in (k, v))
    stored = Addresses(keys, values, k.dtype, 1, v.width, listed=True)
    return _attend_lists(q, None, stored, params)


def _attend_lists(q: Tensor, q_rope: Tensor | None, stored: Addresses, params: AttentionParams) -> Tensor:
    """Queries `[R, T, H, D]`, of which equal groups of heads have a list each, in order -> `[R, T, H, Dv]`."""
    count, entries = stored.keys.shape
    queries, turned = (
        None if x is None else x.reshape(count, 1, x.numel() // max(count * x.shape[-1], 1), x.shape[-1])
        for x in (q, q_rope)
    )
    assert queries is not None
    last = torch.full((count,), entries - 1, dtype=torch.int64, device=q.device)
    seen = attend_addresses(queries, turned, stored, last, torch.ones_like(last), params, FULL_CAUSAL)
    return seen.view(*q.shape[:3], stored.value_dim)
