"""Attention over blocks of slabs, on a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from lmstate.ops.cuda import configs
from lmstate.ops.cuda.device import launch, on_gpu, padded, shared_bytes
from lmstate.ops.types.block_table import BLOCK_TOKENS, Stored
from lmstate.ops.types.params import AttentionParams, CausalMask, QuantizedKV
from lmstate.ops.types.slab_table import SlabTable

SPLIT = 512
"""Positions of a part of the softmax; results depend on it, so it is the same everywhere."""
FEW_QUERIES = 64
"""Queries of a kv head whose parts are programs of their own; of more, a program merges all parts of its queries."""
WIDEST = 256
LINES = 16  # vectors that a program transforms
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
    """Whether all of them are in blocks of slabs that no gradient goes through, in a dtype the kernels multiply."""
    return all(
        isinstance(x, SlabTable) and x.dtype in elements() and x.width <= WIDEST and not x.requires_grad for x in stored
    )


def can_read_latents(*stored: Stored) -> bool:
    """Whether all of them are in blocks of slabs, as in `can_read`, on a GPU with enough shared memory."""
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
    return _attend(q, None, k, v, None, None, starts, counts, params, mask, k.dtype)


def attend_latent(
    q_latent: Tensor, q_rope: Tensor, latent: SlabTable, rope_key: SlabTable, starts: Tensor, counts: Tensor,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """`ops.attend_latent` of latents in slabs; the arguments are those there."""
    params, mask = AttentionParams(scale), CausalMask(window)
    return _attend(q_latent, q_rope, latent, latent, rope_key, None, starts, counts, params, mask, latent.dtype)


def can_read_codes(kv: QuantizedKV, q: Tensor) -> bool:
    """Whether keys and values are in blocks of slabs as codes of 8 bits, a scale for each vector."""
    width = q.shape[-1]
    slabs = all(isinstance(x, SlabTable) for x in kv.tensors)
    return (
        slabs and kv.bits == 8 and kv.tail is None and kv.k_scale.shape[3] == kv.v_scale.shape[3] == 1
        and kv.k.shape[3] == kv.v.shape[3] == width and width & (width - 1) == 0 and 2 <= width <= WIDEST
    )  # fmt: skip


def attend_codes(
    q: Tensor, new: tuple[Tensor, Tensor] | None, kv: QuantizedKV, starts: Tensor, counts: Tensor,
    params: AttentionParams, mask: CausalMask, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`ops.attend_quantized` without a rotation, of what `can_read_codes`; the arguments are those there."""
    k, v, k_scale, v_scale = (cast(SlabTable, x) for x in kv.tensors)
    if new is not None:
        _append_codes(new[0], k, k_scale, starts, counts)
        _append_codes(new[1], v, v_scale, starts, counts)
    seen = _attend(hadamard(q), None, k, v, None, (k_scale, v_scale), starts, counts, params, mask, dtype)
    return hadamard(seen)


def hadamard(x: Tensor) -> Tensor:
    """`kv_format.hadamard` of vectors of a power of two, float32 `[..., D]`."""
    from lmstate.ops.cuda.kernels import attention as kernels

    size = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    lines = x.numel() // size
    if lines:
        launch(
            kernels.hadamard, (-(-lines // LINES),), x.contiguous(), out, lines, LINES=LINES, D=size,
            LOG_D=size.bit_length() - 1,
        )  # fmt: skip
    return out


def _append_codes(new: Tensor, codes: SlabTable, scales: SlabTable, starts: Tensor, counts: Tensor) -> None:
    """Store keys or values `[R, T, K, D]` as codes and scales in their rows' blocks."""
    from lmstate.ops.cuda.kernels import attention as kernels

    rows, width, heads, size = new.shape
    codes.prepare_write(starts, counts)
    scales.prepare_write(starts, counts)
    table = codes.addresses()
    if rows and width:
        launch(
            kernels.append_codes, (rows, width), new.contiguous(), table, scales.addresses(), on_gpu(starts, new),
            on_gpu(counts, new), table.shape[1], width, K=heads, KP=padded(heads, 1), D=size,
            LOG_D=size.bit_length() - 1,
        )  # fmt: skip


def _attend(
    q: Tensor, q_rope: Tensor | None, k: SlabTable, v: SlabTable, rope_key: SlabTable | None,
    scales: tuple[SlabTable, SlabTable] | None, starts: Tensor, counts: Tensor, params: AttentionParams,
    mask: CausalMask, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """dtype: what keys and values are multiplied in. scales: of keys and values that are codes."""
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
    lines, warps, stages = configs.attention(queries, v.width, scales is not None)
    tiles, parts = -(-queries // lines), -(-longest // SPLIT)
    whole = not few or parts == 1 or rows * k.heads * tiles * parts * lines * v.width * 4 > PARTS_AT_MOST
    turning = keys if rope_key is None else rope_key.addresses()
    start, count = on_gpu(starts, q), on_gpu(counts, q)
    shape = (1,) if whole else (rows * k.heads, tiles, parts, lines)
    top, total = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    acc = torch.empty(*shape, v.width, dtype=torch.float32, device=q.device)
    sinks, slopes = (out if each is None else each for each in (params.sinks, params.slopes))
    key_scales, value_scales = (keys, keys) if scales is None else (each.addresses() for each in scales)
    common = {
        "HAS_SINKS": params.sinks is not None, "SPLIT": SPLIT, "HEADS": heads, "GROUP": group, "ROWS": lines,
        "DV": v.width, "DVP": padded(v.width),
    }  # fmt: skip
    rope_width = 1 if q_rope is None else q_rope.shape[3]
    launch(
        kernels.attend, (rows * k.heads, tiles, 1 if whole else parts),
        q.contiguous(), q if q_rope is None else q_rope.contiguous(), keys, values, turning,
        key_scales, value_scales, out, top, total, acc, start, count, sinks, slopes, keys.shape[1], width, parts,
        params.scale, params.softcap or 1.0,
        mask.window or EVERYTHING, mask.chunk or EVERYTHING,
        HAS_SOFTCAP=params.softcap is not None, HAS_SLOPES=params.slopes is not None, LATENT=q_rope is not None,
        CODES=scales is not None, WHOLE=whole, D=head_dim, DP=padded(head_dim), DR=rope_width, DRP=padded(rope_width),
        ELEMENT=elements()[dtype], PRECISION="ieee" if dtype == torch.float32 else "tf32", warps=warps, stages=stages,
        **common,
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
