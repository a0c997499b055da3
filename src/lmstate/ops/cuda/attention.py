"""Attention over blocks of slabs, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

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
LEAST_CODED = 16  # numbers of a vector of fewer than 8 bits
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
    """Whether all of them are in blocks of slabs that no gradient goes through, in one dtype that the kernels
    multiply, on a GPU with enough shared memory for their width."""
    return _fits(stored, WIDEST)


def can_read_latents(*stored: Stored) -> bool:
    """`can_read` of latents, whose vectors may be wider: they are keys and values in one."""
    return _fits(stored, WIDEST_LATENT)


def _fits(stored: Sequence[Stored], widest: int) -> bool:
    return all(
        isinstance(x, SlabTable)
        and x.dtype in elements()
        and x.dtype == stored[0].dtype
        and x.width <= widest
        and not x.requires_grad
        and shared_bytes(x.device.index or 0) >= configs.shared_needed(x.width, x.dtype.itemsize)
        for x in stored
    )


class Addresses(NamedTuple):
    """The place where attention reads: tables int64 `[R, n]` of blocks, or lists of vectors."""

    keys: Tensor
    values: Tensor | None  # None: keys are values too
    dtype: torch.dtype  # in which they are multiplied
    kv_heads: int
    value_dim: int
    beside: Tensor | None = None  # rope keys, or of codes of fewer than 8 bits the newest keys
    scales: tuple[Tensor, Tensor] | None = None
    bits: int = 0  # of codes
    listed: bool = False


def attend(
    q: Tensor, k: SlabTable, v: SlabTable, starts: Tensor, counts: Tensor, params: AttentionParams, mask: CausalMask
) -> Tensor:
    """`ops.attend` of keys and values in slabs; the arguments are those there."""
    stored = Addresses(k.addresses(), v.addresses(), k.dtype, k.heads, v.width)
    return attend_addresses(q, None, stored, starts, counts, params, mask)


def attend_latent(
    q_latent: Tensor, q_rope: Tensor, latent: SlabTable, rope_key: SlabTable, starts: Tensor, counts: Tensor,
    scale: float, window: int | None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`ops.attend_latent` of latents in slabs; the arguments are those there."""
    stored = Addresses(latent.addresses(), None, latent.dtype, 1, latent.width, rope_key.addresses())
    return attend_addresses(
        q_latent, q_rope, stored, starts, counts, AttentionParams(scale, sinks=sinks), CausalMask(window)
    )


def can_read_codes(kv: QuantizedKV, q: Tensor) -> bool:
    """Whether keys and values are in blocks of slabs as codes, in heads of a power of two, with the scales that the
    kernels read: of 8 bits for each vector, of fewer with the newest keys beside them."""
    width, tables = q.shape[-1], kv.tensors if kv.tail is None else (*kv.tensors, kv.tail)
    line, whole = width * kv.bits // 8, kv.bits == 8
    least = 2 if whole else LEAST_CODED
    return (
        all(isinstance(x, SlabTable) for x in tables) and whole == (kv.tail is None)
        and kv.v_scale.shape[3] == 1 and (not whole or kv.k_scale.shape[3] == 1)
        and kv.k.shape[3] == kv.v.shape[3] == line and width & (width - 1) == 0 and least <= width <= WIDEST
        and (kv.tail is None or kv.tail.dtype in elements())
    )  # fmt: skip


def attend_codes(
    q: Tensor, new: tuple[Tensor, Tensor] | None, kv: QuantizedKV, starts: Tensor, counts: Tensor,
    params: AttentionParams, mask: CausalMask, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`ops.attend_quantized` without a rotation, of what `can_read_codes`; the arguments are those there."""
    k, v, k_scale, v_scale = (cast(SlabTable, x) for x in kv.tensors)
    tail = cast("SlabTable | None", kv.tail)
    if new is not None:
        if tail is None:
            _append_codes(new[0], k, k_scale, starts, counts, kv.bits)
        else:
            append(hadamard(new[0]), tail, starts, counts)
            _encode_blocks(tail, k, k_scale, starts, counts, new[0].shape[1], kv.bits)
        _append_codes(new[1], v, v_scale, starts, counts, kv.bits)
    newest = None if tail is None else _as_wide(tail.addresses(), k.addresses())
    scales = k_scale.addresses(), v_scale.addresses()
    dtype = dtype if tail is None else tail.dtype
    stored = Addresses(k.addresses(), v.addresses(), dtype, k.heads, q.shape[-1], newest, scales, kv.bits)
    return hadamard(attend_addresses(hadamard(q), None, stored, starts, counts, params, mask))


def _as_wide(table: Tensor, other: Tensor) -> Tensor:
    """A table with as many entries as another has."""
    return (
        table
        if table.shape[1] == other.shape[1]
        else torch.nn.functional.pad(table, (0, other.shape[1] - table.shape[1]))
    )


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


def _append_codes(
    new: Tensor, codes: SlabTable, scales: SlabTable, starts: Tensor, counts: Tensor, bits: int
) -> None:  # fmt: skip
    """Store keys or values `[R, T, K, D]` as codes and scales in their rows' blocks."""
    from lmstate.ops.cuda.kernels import attention as kernels

    rows, width, heads, size = new.shape
    codes.prepare_write(starts, counts)
    scales.prepare_write(starts, counts)
    table = codes.addresses()
    if rows and width:
        launch(
            kernels.append_codes, (rows * width,), new.contiguous(), table, scales.addresses(), on_gpu(starts, new),
            on_gpu(counts, new), table.shape[1], width, K=heads, KP=padded(heads, 1), D=size,
            LOG_D=size.bit_length() - 1, BITS=bits,
        )  # fmt: skip


def _encode_blocks(
    floats: SlabTable, codes: SlabTable, scales: SlabTable, starts: Tensor, counts: Tensor, width: int, bits: int
) -> None:
    """Store codes of the blocks of keys that a step of up to `width` tokens a row makes whole."""
    from lmstate.ops.cuda.kernels import attention as kernels

    codes.prepare_write(starts, counts)
    scales.prepare_write(starts, counts)
    table = codes.addresses()
    rows, heads = len(table), codes.heads
    if rows and width:
        launch(
            kernels.encode_blocks, (rows, (width + BLOCK_TOKENS - 1) // BLOCK_TOKENS, heads),
            _as_wide(floats.addresses(), table), table, scales.addresses(), on_gpu(starts, table),
            on_gpu(counts, table), table.shape[1], K=heads, D=floats.width, BITS=bits, ELEMENT=elements()[floats.dtype],
        )  # fmt: skip


def attend_addresses(
    q: Tensor, q_rope: Tensor | None, stored: Addresses, starts: Tensor, counts: Tensor, params: AttentionParams,
    mask: CausalMask,
) -> Tensor:  # fmt: skip
    """Attention to what is at addresses; the other arguments are those of `ops.attend`.

    A listed row has one query a head, which sees all of the list.
    """
    from lmstate.ops.cuda.kernels import attention as kernels

    rows, width, heads, head_dim = q.shape
    keys, dtype, kv_heads, value_dim = stored.keys, stored.dtype, stored.kv_heads, stored.value_dim
    group = heads // kv_heads
    out = torch.zeros(rows, width, heads, value_dim, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    if starts.is_cpu:
        longest, queries = int((starts + counts).max()), int(counts.max()) * group
    else:  # of a recorded step, which serves rows of any length that the tables hold
        longest, queries = keys.shape[1] * (1 if stored.listed else BLOCK_TOKENS), width * group
    if not longest:
        return out
    few = queries <= FEW_QUERIES
    lines, warps, stages, _ = configs.attention(queries, value_dim, stored.bits)
    tiles, parts, pairs = -(-queries // lines), -(-longest // SPLIT), rows * kv_heads
    whole = not few or parts == 1 or pairs * tiles * parts * lines * value_dim * 4 > PARTS_AT_MOST
    start, count = on_gpu(starts, q), on_gpu(counts, q)
    shape = (1,) if whole else (tiles, pairs, parts, lines)
    top, total = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    acc = torch.empty(*shape, value_dim, dtype=torch.float32, device=q.device)
    sinks, slopes = (out if each is None else each for each in (params.sinks, params.slopes))
    values, beside = (keys if each is None else each for each in (stored.values, stored.beside))
    key_scales, value_scales = stored.scales or (keys, keys)
    common = {
        "HAS_SINKS": params.sinks is not None, "SPLIT": SPLIT, "HEADS": heads, "GROUP": group, "ROWS": lines,
        "DV": value_dim, "DVP": padded(value_dim),
    }  # fmt: skip
    rope_width = 0 if q_rope is None else q_rope.shape[3]
    launch(
        kernels.attend, (pairs * tiles, 1 if whole else parts),
        q.contiguous(), q if q_rope is None else q_rope.contiguous(), keys, values, beside, key_scales, value_scales,
        out, top, total, acc, start, count, sinks, slopes, keys.shape[1], width, pairs, parts,
        params.scale, params.softcap or 1.0, mask.window or EVERYTHING, mask.chunk or EVERYTHING,
        HAS_SOFTCAP=params.softcap is not None, HAS_SLOPES=params.slopes is not None, LATENT=stored.values is None,
        LISTED=stored.listed, BITS=stored.bits, WHOLE=whole, D=head_dim, DP=padded(head_dim), DR=rope_width,
        DRP=padded(max(1, rope_width)), ELEMENT=elements()[dtype],
        PRECISION="ieee" if dtype == torch.float32 else "tf32", warps=warps, stages=stages, **common,
    )  # fmt: skip
    if not whole:
        launch(
            kernels.merge, (pairs * tiles,), out, top, total, acc, start, count, sinks, width, pairs, parts, **common
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
            kernels.append, (rows * width,), new.contiguous(), table, on_gpu(starts, new), on_gpu(counts, new),
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
