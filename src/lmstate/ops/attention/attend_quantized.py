"""Attention over keys and values that are stored in few bits, ring or not: rotating, storing, attending.

Keys and values go through a Hadamard transform first, so that no channel stands out (QuaRot, 2404.00456). Values are
codes as soon as they are stored, with a scale for each vector. So are keys of 8 bits, and of any width where tokens do
not stay together (slots that a policy evicts from). Else keys of 4 bits or fewer have a scale for each channel of a
block of positions (KIVI, 2402.02750), and are codes once their block is whole; the newest are also floats, in a ring. A
query sees floats of the keys in its own block of positions, codes of those before it: by its position alone, however
the tokens came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.attention.attend import MOST, attend_reference, attend_span, unroll
from lmstate.ops.attention.attend_slots import OBSERVED, attend_slots
from lmstate.ops.attention.kv_store import append_one
from lmstate.ops.attention.rope import rope
from lmstate.ops.cuda import attention as cuda
from lmstate.ops.types import kv_format
from lmstate.ops.types.block_table import BlockTable, dense
from lmstate.ops.types.kv_format import BLOCK
from lmstate.ops.types.params import FULL_CAUSAL, AttentionParams, AttentionSums, CausalMask, QuantizedKV, RopeTables

if TYPE_CHECKING:
    from lmstate.ops.cpu.attention import AttentionBodies

WHOLE = 512
"""Numbers of a vector that share a scale, at most: a head's."""


def attend_quantized(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    rotation: RopeTables | None,
    kv: QuantizedKV,
    starts: Tensor,
    counts: Tensor,
    params: AttentionParams,
    mask: CausalMask = FULL_CAUSAL,
    *,
    dtype: torch.dtype = torch.float32,
    columns: AttentionSums | None = None,
) -> Tensor:
    """Store new keys and values `[R, T, K, D]`, and attend: q float32 `[R, T, H, D]` -> float32 `[R, T, H, Dv]`.

    `rotation` turns q and the new keys first. The other arguments are those of `ops.attend`. `kv.tail`: keys as floats,
    a ring `[R, K, S', D]` that holds the step and `BLOCK - 1` positions before it; without one every vector has its own
    scale. The reference expands what it reads in `dtype`. Adds what each slot receives to `columns`, of a ring that has
    not wrapped. Reads starts and counts on the host.
    """
    body = _native(q, new, kv, params.sinks)
    most = MOST if columns is None else OBSERVED
    if body is not None and q.shape[1] <= most:
        out = body.attend_quantized(q, new, rotation, kv, starts, counts, params, mask, columns, dtype=dtype)
        assert out is not None
        return out
    if rotation is not None:
        q = rope(q, *rotation)
        new = None if new is None else (rope(new[0], *rotation), new[1])
    known = columns is None and params.biases is None
    if known and dispatch.gpu(q, *(new or ()), kv.k, params.sinks) and cuda.can_read_codes(kv, q):
        return cuda.attend_codes(q, new, kv, starts, counts, params, mask, dtype)
    if new is not None:
        store_quantized(q, new, kv, starts, counts, params, mask)
    if body is not None:
        blocks = []
        for first, block in zip(range(0, q.shape[1], most), q.split(most, dim=1)):
            some = (counts - first).clamp(0, most)
            own = params.of(slice(None), slice(first, first + most))
            out = body.attend_quantized(block, None, None, kv, starts + first, some, own, mask, columns, dtype=dtype)
            assert out is not None
            blocks.append(out)
        return torch.cat(blocks, dim=1)
    rings = _rings(kv)
    if rings.tail is None:
        end = min(rings.k.shape[2], int((starts + counts).max()))  # position p < end is in slot p, or the ring is full
        k, v = (
            kv_format.decode(codes[:, :, :end], scales[:, :, :end], kv.bits, dtype)
            for codes, scales in ((rings.k, rings.k_scale), (rings.v, rings.v_scale))
        )
        if columns is None:
            seen = attend_reference(kv_format.hadamard(q), k, v, starts, counts, params, mask)
        else:
            slots, observed = torch.arange(end, device=k.device), columns._replace(sums=columns.sums[..., :end])
            where = slots.expand(k.shape[:3])
            seen = attend_slots(kv_format.hadamard(q), k, v, where, starts, counts, params, mask, observed)
    else:
        seen = _attend_blocks(kv_format.hadamard(q), rings, rings.tail, starts, counts, dtype, params, mask)
    return kv_format.hadamard(seen)


def store_quantized(
    q: Tensor,
    new: tuple[Tensor, Tensor],
    kv: QuantizedKV,
    starts: Tensor,
    counts: Tensor,
    params: AttentionParams,
    mask: CausalMask = FULL_CAUSAL,
) -> None:
    """Store new keys, which are turned, and values for the attention of `attend_quantized`, which takes the same."""
    body = _native(q, new, kv, params.sinks)
    if body is not None:
        body.attend_quantized(q, new, None, kv, starts, counts, params, mask, stores_only=True)
    else:
        _store(new, kv, starts, counts)


def _native(
    q: Tensor, new: tuple[Tensor, Tensor] | None, kv: QuantizedKV, sinks: Tensor | None
) -> AttentionBodies | None:
    library = dispatch.native(q, *(new or ()), kv.k, sinks)
    if library is None:
        return None
    body = library.attention
    return body if body.can_attend_quantized(q, kv) else None


class _Rings(NamedTuple):
    """`QuantizedKV` whose parts are rings, as the references read them."""

    bits: int
    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    tail: Tensor | None = None


def _rings(kv: QuantizedKV) -> _Rings:
    k, v, k_scale, v_scale = map(dense, kv.tensors)
    return _Rings(kv.bits, k, v, k_scale, v_scale, None if kv.tail is None else dense(kv.tail))


def _store(new: tuple[Tensor, Tensor], kv: QuantizedKV, starts: Tensor, counts: Tensor) -> None:
    rings = _rings(kv)
    if rings.tail is None:
        _store_transformed(new[0], rings.k, rings.k_scale, starts, counts, kv.bits)
        _store_transformed(new[1], rings.v, rings.v_scale, starts, counts, kv.bits)
    else:
        _store_blocks(new, rings, rings.tail, starts, counts)
    whole = 1 if rings.tail is None else BLOCK  # keys of positions before the step became codes with it
    for of, ring, least in zip(kv[1:], rings[1:], (whole, 1, whole, 1, 1)):
        if isinstance(of, BlockTable) and ring is not None:
            of.write_back(ring, starts, counts, least)


def _store_transformed(new: Tensor, codes: Tensor, scales: Tensor, starts: Tensor, counts: Tensor, bits: int) -> None:
    for coded, ring in zip(kv_format.encode(kv_format.hadamard(new), bits, WHOLE), (codes, scales)):
        append_one(coded, ring, starts, counts)


def _store_blocks(new: tuple[Tensor, Tensor], kv: _Rings, tail: Tensor, starts: Tensor, counts: Tensor) -> None:
    """New keys into the ring, and each block of them that is whole then into codes."""
    append_one(kv_format.hadamard(new[0]), tail, starts, counts)
    _store_transformed(new[1], kv.v, kv.v_scale, starts, counts, kv.bits)
    for r, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        first, whole = start // BLOCK * BLOCK, (start + count) // BLOCK * BLOCK
        if whole > first:
            where = torch.arange(first, whole, device=tail.device) % kv.k.shape[2]
            k = unroll(tail[r : r + 1], first, whole)[0]
            kv.k[r, :, where], kv.k_scale[r, :, where] = kv_format.encode_blocks(k, kv.bits)


def _attend_blocks(
    q: Tensor,
    kv: _Rings,
    tail: Tensor,
    starts: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
    params: AttentionParams,
    mask: CausalMask,
) -> Tensor:
    """The queries of one block of positions after another; all of it stays transformed."""
    rows, tokens, heads, _ = q.shape
    dim_v = kv.v.shape[3] * 8 // kv.bits
    out = []
    for r, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        first, end, low = start // BLOCK * BLOCK, start + count, mask.first_visible(start) // BLOCK * BLOCK
        coded = max(low, (end - 1) // BLOCK * BLOCK)
        floats = unroll(tail[r : r + 1], first, end).to(dtype)  # [1, K, end - first, D]
        k, k_scale = (unroll(x[r : r + 1], low, coded) for x in (kv.k, kv.k_scale))  # [1, K, coded - low, ...]
        v, v_scale = (unroll(x[r : r + 1], low, end) for x in (kv.v, kv.v_scale))  # [1, K, end - low, ...]
        keys, values = kv_format.decode_blocks(k, k_scale, kv.bits, dtype), kv_format.decode(v, v_scale, kv.bits, dtype)
        pieces, position = [], start
        while position < end:
            block = position // BLOCK * BLOCK
            stop, a = min(end, block + BLOCK), mask.first_visible(position)
            b = max(a, block)
            k = torch.cat([keys[:, :, a - low : b - low], floats[:, :, b - first : stop - first]], dim=2)
            v = values[:, :, a - low : stop - low]
            some = slice(position - start, stop - start)
            own = params.of(slice(r, r + 1), some)
            pieces.append(attend_span(q[r : r + 1, some], k, v, position, a, own, mask))
            position = stop
        out.append(torch.cat([*pieces, q.new_zeros(1, tokens - count, heads, dim_v)], dim=1))
    return torch.cat(out) if rows else q.new_zeros(0, tokens, heads, dim_v)
