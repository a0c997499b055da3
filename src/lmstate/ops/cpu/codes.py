"""The call into a native library's attention over keys and values in few bits, checked as in `library`."""

from __future__ import annotations

import ctypes
from struct import Struct

import torch
from torch import Tensor

from lmstate.ops.cpu.arguments import (
    KINDS,
    MAX_HEAD_DIM,
    check_attended,
    column_pointers,
    function,
    integers,
    rope_fields,
    rule_fields,
    sinks_pointer,
)
from lmstate.ops.types import kv_format
from lmstate.ops.types.params import AttentionParams, AttentionSums, CausalMask, Held, RopeTables

_ARGUMENTS = Struct("4P10q" * 2 + "2P6q" + "2q" + "4P2q" + "9P21q2d")
_NO_ROTATION = (0,) * 28
_NOTHING_NEW = (0,) * 8

# Below this many new numbers a second thread costs more than it saves.
_FEW = 16384


class Codes:
    """Bodies of one variant."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = function(library, "lmstate_attend_codes")

    def can(self, q: Tensor, held: Held, tail: Tensor | None, bits: int) -> bool:
        """Whether these dtypes and head dims are among those of the body."""
        dim, dim_v = q.shape[-1], held.v.shape[-1] * 8 // bits
        return (
            q.dtype == torch.float32
            and max(dim, dim_v) <= MAX_HEAD_DIM
            and dim % 8 == dim_v % 8 == 0
            and (tail is None or tail.dtype in KINDS)
        )

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        rotation: RopeTables | None,
        held: Held,
        tail: Tensor | None,
        starts: Tensor,
        counts: Tensor,
        bits: int,
        scoring: AttentionParams,
        sight: CausalMask,
        columns: AttentionSums | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        stores_only: bool = False,
    ) -> Tensor | None:
        """`attend_quantized`, or only what it stores: float32 `[R, T, H, Dv]`, or None.

        Codes may be expanded in `dtype`; beside a tail in that of the tail.
        """
        rows, tokens, heads, dim = q.shape
        kv_heads, slots = held.k.shape[1:3]
        dim_v = held.v.shape[3] * 8 // bits
        check_held(held, tail, (rows, kv_heads), dim, dim_v, bits)
        starts, counts = integers(starts, "starts", rows), integers(counts, "counts", rows)
        threads = torch.get_num_threads() if q.numel() > _FEW else 1
        rotates: tuple[int, ...] = _NO_ROTATION
        source: tuple[int, ...] = _NOTHING_NEW
        if new is not None:
            k, v = (x if x.stride(3) == 1 else x.contiguous() for x in new)
            if k.shape != (rows, tokens, kv_heads, dim) or v.shape != (rows, tokens, kv_heads, dim_v):
                raise ValueError(f"new keys {list(k.shape)} and values {list(v.shape)} do not fit {list(held.k.shape)}")
            if rotation is not None:
                cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
                turned_q, turned_k = (torch.empty(x.shape, dtype=torch.float32) for x in (q, k))
                rotates = (
                    *rope_fields(q, cos, sin, rotation.interleaved, turned_q, threads),
                    *rope_fields(k, cos, sin, rotation.interleaved, turned_k, threads),
                )
                q, k = turned_q, turned_k
            source = (k.data_ptr(), v.data_ptr(), *(n for pair in zip(k.stride()[:3], v.stride()[:3]) for n in pair))
        if q.stride(3) != 1 or (tail is None and rotates is _NO_ROTATION):
            q = q.clone(memory_format=torch.contiguous_format)  # where there is no tail, it is turned in place
        out = None if stores_only else torch.empty(rows, tokens, heads, dim_v, dtype=torch.float32)
        sinks = sinks_pointer(scoring, heads)
        ring, strides = (0, (0, 0, 0)) if tail is None else (tail.data_ptr(), tail.stride()[:3])
        kind = KINDS[dtype if tail is None else tail.dtype]
        arguments = _ARGUMENTS.pack(
            *rotates, *source, rotates is not _NO_ROTATION, threads,
            held.k.data_ptr(), held.v.data_ptr(), held.k_scale.data_ptr(), held.v_scale.data_ptr(),
            bits, 0 if tail is None else tail.shape[2],
            0 if out is None else q.data_ptr(), ring, 0, starts.data_ptr(), counts.data_ptr(), sinks,
            0 if out is None else out.data_ptr(), *column_pointers(columns, held.k.shape[:3]),
            rows, tokens, heads, kv_heads, slots, dim, dim_v, *q.stride()[:3], *strides, 0, 0, 0,
            0 if columns is None else columns.sums.shape[2], kind,
            *rule_fields(scoring, sight),
        )  # fmt: skip
        check_attended(self._attend(arguments), q, held.k, starts, counts)
        return out


def check_held(held: Held, tail: Tensor | None, rows: tuple[int, int], dim: int, dim_v: int, bits: int) -> None:
    """ValueError where these do not fit `(R, K)` and widths of keys and of values."""
    slots = held.k.shape[2]
    k_scales = 1 if tail is None else kv_format.block_scales(dim)
    expected = {
        "k": (held.k, dim * bits // 8, kv_format.code_dtype(bits)),
        "v": (held.v, dim_v * bits // 8, kv_format.code_dtype(bits)),
        "k_scale": (held.k_scale, k_scales, torch.float16),
        "v_scale": (held.v_scale, 1, torch.float16),
    }
    for name, (tensor, width, dtype) in expected.items():
        if tensor.shape != (*rows, slots, width) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} {[*rows, slots, width]}; "
                f"this is {tensor.dtype} {list(tensor.shape)}"
            )
    if tail is not None:
        if slots % kv_format.BLOCK:
            raise ValueError(f"blocks of {kv_format.BLOCK} positions cannot lie in {slots} slots")
        if (*tail.shape[:2], tail.shape[3]) != (*rows, dim) or tail.stride(3) != 1:
            raise ValueError(f"the tail is {list(tail.shape)}; keys of {dim} do not fit it")
