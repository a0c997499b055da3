"""Attention to chosen blocks of positions (MiniMax-M3): an index scores keys, and a query attends to the best blocks.

A block is as good as its best key. The blocks of a query itself are always chosen; of two that are the same, the later
one is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.attention.attend import attend
from lmstate.ops.attention.attend_quantized import attend_quantized
from lmstate.ops.attention.choose import GATHERED, SCORES, gather_positions
from lmstate.ops.cuda import attention as cuda
from lmstate.ops.cuda import chosen as cuda_chosen
from lmstate.ops.dense.linear import linear
from lmstate.ops.types.block_table import BLOCK_TOKENS, BlockTable, Stored, dense
from lmstate.ops.types.params import AttentionParams, QuantizedKV
from lmstate.ops.types.slab_table import SlabTable
from lmstate.ops.weights.grouped import FloatWeight


@torch.no_grad()
def choose_blocks(
    q: Tensor, keys: Stored, starts: Tensor, counts: Tensor, *, budget: int, size: int, local: int
) -> Tensor:
    """The blocks that new tokens attend to: int64 `[R, T, J, k]` in ascending order, then -1.

    q              [R, T, J, Di]    float32: each of J heads chooses for itself
    keys           [R, 1, S, Di]    blocks, or position p in slot p; new tokens are already stored
    starts, counts [R] int64        query i < counts[r] of row r is at position starts[r] + i and sees the positions
                                    up to its own
    budget         the most blocks of a query; k is no more than there are
    size, local    positions of a block, and how many blocks up to the query's own are chosen whatever their scores

    A score is one product, whose bits do not depend on how many are computed.
    """
    end = max((starts + counts).tolist(), default=0)
    budget = min(budget, -(-end // size))
    body = dispatch.native(q, keys)
    native = body.choosing.choose_blocks if body is not None and body.choosing.can_choose(q, keys) else None
    choose = native or choose_blocks_reference
    tokens = max(1, SCORES // max(q.shape[0] * q.shape[2] * end, 1))
    parts = [
        choose(
            q[:, first : first + tokens], keys, starts + first, (counts - first).clamp(0, tokens), budget=budget,
            size=size, local=local,
        )
        for first in range(0, max(q.shape[1], 1), tokens)
    ]  # fmt: skip
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def choose_blocks_reference(
    q: Tensor, keys: Stored, starts: Tensor, counts: Tensor, *, budget: int, size: int, local: int
) -> Tensor:
    rows, width, heads, _ = q.shape
    end = max((starts + counts).tolist(), default=0)
    blocks, device = max(-(-end // size), budget), q.device
    held = dense(keys)[:, 0, :end].float()
    starts, counts = (x.to(device)[:, None] for x in (starts, counts))
    offsets, numbers = torch.arange(width, device=device), torch.arange(blocks, device=device)
    own = (starts + offsets)[:, :, None, None]  # [R, T, 1, 1]
    products = [linear(q[r].flatten(0, 1), FloatWeight(held[r])) for r in range(rows)]
    scores = torch.stack(products).unflatten(1, (-1, heads)) if rows else q.new_zeros(0, width, heads, end)
    scores = scores.masked_fill(torch.arange(end, device=device) > own, float("-inf"))
    scores = torch.nn.functional.pad(scores, (0, blocks * size - end), value=float("-inf"))
    best = scores.unflatten(-1, (blocks, size)).amax(-1)  # [R, T, J, B]
    mine = own // size
    best = best.masked_fill((numbers > mine - local) & (numbers <= mine), float("inf"))
    # From the last block on: a stable sort keeps the order of those whose scores are the same.
    order = best.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    chosen = blocks - 1 - order[..., :budget]
    padding = (offsets >= counts)[:, :, None, None]
    chosen = chosen.masked_fill((chosen > mine) | padding, blocks).sort(dim=-1).values
    return chosen.masked_fill(chosen == blocks, -1)


def attend_blocks(
    q: Tensor,
    k: Stored,
    v: Stored,
    chosen: Tensor,
    starts: Tensor,
    counts: Tensor,
    params: AttentionParams,
    *,
    size: int,
) -> Tensor:
    """Attend to chosen blocks of stored keys and values -> float32 `[R, T, H, Dv]`, zero at padding.

    q              [R, T, H, D]
    k, v           [R, K, S, D] and [R, K, S, Dv]: blocks, or position p in slot p
    chosen         [R, T, J, k] int64, see `choose_blocks`: heads in J equal groups go by a choice each, K divides J
    starts, counts [R] int64, as in `choose_blocks`

    Reads and products follow their number. Native bodies read them where they are, if they are whole blocks of a table;
    else they are put side by side.
    """
    native = dispatch.native(q, k, v) is not None and not (k.requires_grad or v.requires_grad)
    if native and isinstance(k, BlockTable) and isinstance(v, BlockTable) and size % BLOCK_TOKENS == 0:
        return _attend_in_place(q, k, v, chosen, starts, counts, params, size)
    if q.dtype == torch.float32 and dispatch.gpu(q, k, v) and cuda.can_read(k, v) and params.plain:
        held = cast(SlabTable, k), cast(SlabTable, v)
        return cuda_chosen.attend_blocks(q, *held, chosen, starts, counts, params, size)

    def seen(queries: Tensor, held: Sequence[Tensor], starts: Tensor, counts: Tensor) -> Tensor:
        keys, values = held
        return attend(queries, keys, values, starts, counts, params)

    return _attend_beside(q, (k, v), chosen, starts, counts, size, v.shape[3], seen)


def attend_coded_blocks(
    q: Tensor,
    kv: QuantizedKV,
    chosen: Tensor,
    starts: Tensor,
    counts: Tensor,
    params: AttentionParams,
    *,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """`attend_blocks` over codes of 8 bits, which are put side by side. `dtype`: as in `attend_quantized`."""

    def seen(queries: Tensor, held: Sequence[Tensor], starts: Tensor, counts: Tensor) -> Tensor:
        return attend_quantized(queries, None, None, QuantizedKV(kv.bits, *held), starts, counts, params, dtype=dtype)

    return _attend_beside(q, kv.tensors, chosen, starts, counts, size, kv.v.shape[3], seen)


def _attend_beside(
    q: Tensor,
    held: Sequence[Stored],
    chosen: Tensor,
    starts: Tensor,
    counts: Tensor,
    size: int,
    value_dim: int,
    attend: Callable[[Tensor, Sequence[Tensor], Tensor, Tensor], Tensor],
) -> Tensor:
    """Put the chosen blocks of what is stored, `[R, K, S, ...]` each, side by side, and attend to them."""
    rows, width, heads, _ = q.shape
    groups, device = chosen.shape[2], chosen.device
    each, kv_heads = heads // groups, held[0].shape[1]
    starts, counts = starts.to(device)[:, None], counts.to(device)[:, None]
    offsets, inside, parts = torch.arange(width, device=device), torch.arange(size, device=device), []
    tokens = max(1, GATHERED // max(rows * chosen.shape[3] * size * sum(x.shape[3] for x in held), 1))
    for first in range(0, max(width, 1), tokens):
        some = slice(first, first + tokens)
        own = torch.minimum(starts + offsets[some], starts + counts - 1)[:, :, None, None, None]
        places = chosen[:, some, :, :, None] * size + inside  # [R, t, J, k, size]
        places = places.masked_fill((chosen[:, some, :, :, None] < 0) | (places > own), -1).flatten(3)
        real = (offsets[some] < counts).flatten().long().cpu()
        seen = []
        for group in range(groups):
            at, head = places[:, :, group].flatten(1), group * kv_heads // groups
            # A row of its own for each query, which is at the last of what it sees.
            found = [
                gather_positions(x, at, head).unflatten(1, (-1, places.shape[3])).flatten(0, 1)[:, None] for x in held
            ]
            queries = q[:, some, group * each : (group + 1) * each].flatten(0, 1)[:, None]
            last = ((places[:, :, group] >= 0).sum(-1).flatten() - 1).clamp(min=0).cpu()
            seen.append(attend(queries, found, last, real))
        parts.append(torch.cat(seen, dim=2).view(rows, -1, heads, value_dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_in_place(
    q: Tensor,
    k: BlockTable,
    v: BlockTable,
    chosen: Tensor,
    starts: Tensor,
    counts: Tensor,
    params: AttentionParams,
    size: int,
) -> Tensor:
    """Each query and group of heads is a row of a table of its own, which has the blocks that it sees one by one."""
    rows, width, heads, _ = q.shape
    groups, each = chosen.shape[2], size // BLOCK_TOKENS
    offsets = torch.arange(width)
    own = torch.minimum(starts[:, None] + offsets, (starts + counts)[:, None] - 1)[:, :, None, None]
    seen = (own - chosen * size + 1).clamp(0, size).masked_fill(chosen < 0, 0).sum(-1)  # [R, T, J]
    places = chosen.clamp(min=0)[..., None] * each + torch.arange(each)  # [R, T, J, k, each]
    entries = places.flatten(3).clamp(max=k.pointers.shape[1] - 1).numpy()
    group_heads = np.arange(groups)[:, None] * k.shape[1] // groups  # [J, 1]

    def table(of: BlockTable) -> BlockTable:
        pointers = of.pointers[np.arange(rows)[:, None, None, None], entries]
        pointers = pointers + group_heads * of.stride(1) * of.dtype.itemsize
        return of.of_pointers(np.ascontiguousarray(pointers.reshape(-1, entries.shape[-1])))

    queries = q.unflatten(2, (groups, -1)).flatten(0, 2)[:, None]  # [R * T * J, 1, H / J, D]
    real = seen.masked_fill((offsets >= counts[:, None])[..., None], 0).flatten().clamp(max=1)
    out = attend(queries, table(k), table(v), (seen.flatten() - 1).clamp(min=0), real, params)
    return out.view(rows, width, heads, v.width)
