"""Attention over blocks of slabs, on a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lmstate.ops.cuda import configs
from lmstate.ops.cuda.device import launch, on_gpu, padded, shared_bytes
from lmstate.ops.types.block_table import BLOCK_TOKENS, Stored
from lmstate.ops.types.params import AttentionParams, CausalMask
from lmstate.ops.types.slab_table import SlabTable

SPLIT = 512
"""Positions of a part of the softmax; results depend on it, so it is the same everywhere."""
FEW_QUERIES = 64
"""Queries of a kv head whose parts are programs of their own; of more, a program merges all parts of its queries."""
WIDEST = 256
WIDEST_LATENT = 512
PARTS_AT_MOST = 64 << 20
"""Bytes of unmerged parts; where they would take more, a program merges all parts of its queries."""
EVERYTHING = 1 << 30
"""A window and a chunk that leave nothing out."""


@lru_cache(maxsize=1)
def elements() -> dict[torch.dtype, Any]:
    """Triton's types of stored numbers."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def can_read(*stored: Stored) -> bool:
    """Whether all of them lie in blocks of slabs that no gradient goes through, in a dtype the kernels multiply."""
    return all(
        isinstance(x, SlabTable) and x.dtype in elements() and x.width <= WIDEST and not x.requires_grad for x in stored
    )


def can_read_latents(*stored: Stored) -> bool:
    """Whether all of them lie in blocks of slabs, as in `can_read`, on a GPU with enough shared memory."""
    if any(x.width > WIDEST for x in stored if isinstance(x, SlabTable)):
        index = stored[0].device.index or 0
        if shared_bytes(index) < configs.LATENT_BYTES:
            return False
    return all(
        isinstance(x, SlabTable) and x.dtype in elements() and x.width <= WIDEST_LATENT and not x.requires_grad
        for x in stored
    )


def attend(
    q: Tensor, k: SlabTable, v: SlabTable, starts: Tensor, counts: Tensor, params: AttentionParams, mask: CausalMask
) -> Tensor:
    """`ops.attend` of keys and values in slabs; the arguments are those there."""
    return _attend(q, None, k, v, None, starts, counts, params, mask)


def attend_latent(
    q_latent: Tensor, q_rope: Tensor, latent: SlabTable, rope_key: SlabTable, starts: Tensor, counts: Tensor,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """`ops.attend_latent` of latents in slabs; the arguments are those there."""
    params, mask = AttentionParams(scale), CausalMask(window)
    return _attend(q_latent, q_rope, latent, latent, rope_key, starts, counts, params, mask)


def _attend(
    q: Tensor, q_rope: Tensor | None, k: SlabTable, v: SlabTable, rope_key: SlabTable | None, starts: Tensor,
    counts: Tensor, params: AttentionParams, mask: CausalMask,
) -> Tensor:  # fmt: skip
    from lmstate.ops.cuda.kernels import attention as kernels

    rows, width, heads, head_dim = q.shape
    group = heads // k.heads
    out = torch.zeros(rows, width, heads, v.width, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    keys, values = k.addresses(), v.addresses()
    if starts.is_cpu:
        longest, queries = int((starts + counts).max()), int(counts.max()) * group
    else:  # of a recorded step, which serves rows of any length that the tables hold
        longest, queries = keys.shape[1] * BLOCK_TOKENS, width * group
    if not longest:
        return out
    few = queries <= FEW_QUERIES
    lines, warps, stages = configs.attention(queries, v.width)
    tiles, parts = -(-queries // lines), -(-longest // SPLIT)
    whole = not few or parts == 1 or rows * k.heads * tiles * parts * lines * v.width * 4 > PARTS_AT_MOST
    turning = keys if rope_key is None else rope_key.addresses()
    start, count = on_gpu(starts, q), on_gpu(counts, q)
    shape = (1,) if whole else (rows * k.heads, tiles, parts, lines)
    top, total = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    acc = torch.empty(*shape, v.width, dtype=torch.float32, device=q.device)
    sinks, slopes = (out if each is None else each for each in (params.sinks, params.slopes))
    element = elements()[k.dtype]
    common = {
        "HAS_SINKS": params.sinks is not None, "SPLIT": SPLIT, "HEADS": heads, "GROUP": group, "ROWS": lines,
        "DV": v.width, "DVP": padded(v.width),
    }  # fmt: skip
    rope_width = 1 if q_rope is None else q_rope.shape[3]
    launch(
        kernels.attend, (rows * k.heads, tiles, 1 if whole else parts),
        q.contiguous(), q if q_rope is None else q_rope.contiguous(), keys, values, turning, out, top, total, acc,
        start, count, sinks, slopes, keys.shape[1], width, parts, params.scale, params.softcap or 1.0,
        mask.window or EVERYTHING, mask.chunk or EVERYTHING,
        HAS_SOFTCAP=params.softcap is not None, HAS_SLOPES=params.slopes is not None, LATENT=q_rope is not None,
        WHOLE=whole, D=head_dim, DP=padded(head_dim), DR=rope_width, DRP=padded(rope_width), ELEMENT=element,
        PRECISION="ieee" if k.dtype == torch.float32 else "tf32", warps=warps, stages=stages, **common,
    )  # fmt: skip
    if not whole:
        launch(
            kernels.merge, (rows * k.heads, tiles), out, top, total, acc, start, count, sinks, width, parts, **common
        )
    return out


def append(new: Tensor, stored: SlabTable, starts: Tensor, counts: Tensor) -> None:
    """Store new keys or values `[R, T, K, D]` in their rows' blocks, rounded."""
    from lmstate.ops.cuda.kernels import attention as kernels

    rows, width, heads, size = new.shape
    stored.prepare_write(starts, counts)
    table = stored.addresses()
    if rows and width:
        launch(
            kernels.append, (rows, width), new.contiguous(), table, on_gpu(starts, new), on_gpu(counts, new),
            table.shape[1], width, K=heads, D=size, DP=padded(heads * size), ELEMENT=elements()[stored.dtype],
        )  # fmt: skip


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`ops.rope`; the arguments are those there."""
    from lmstate.ops.cuda.kernels import attention as kernels

    rows, width, heads, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        cos, sin = (each.expand(rows, width, -1).contiguous() for each in (cos, sin))
        launch(
            kernels.rope, (rows * width, heads), x.contiguous(), cos, sin, out, heads,
            D=size, DP=padded(size), HALF=cos.shape[-1], INTERLEAVED=interleaved, warps=1,
        )  # fmt: skip
    return out


assert BLOCK_TOKENS == 64, "kernels read tiles of 64 positions"
