"""Rotation, storing and attention, in floats, in few bits and over latents, checked so that C may trust them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lmstate.ops.cpu import abi
from lmstate.ops.cpu.abi import KINDS, MAX_HEAD_DIM
from lmstate.ops.cpu.arguments import (
    check_appended,
    check_attended,
    check_quantized_kv,
    column_pointers,
    function,
    integers,
    pack_append,
    pack_attend,
    pack_biases,
    pack_codes,
    pack_rope,
    sinks_pointer,
    slopes_pointer,
    table_pointers,
    table_shape,
    threads_for,
)
from lmstate.ops.types.block_table import Stored
from lmstate.ops.types.params import AttentionParams, AttentionSums, CausalMask, QuantizedKV, RopeTables


class AttentionBodies:
    """The bodies of one variant. Queries are float32; every method but `append` returns a new tensor, contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rope = function(library, "lmstate_rope")
        self._append = function(library, "lmstate_append")
        self._attend = function(library, "lmstate_attend")
        self._rotate_attend = function(library, "lmstate_rotate_attend")
        self._attend_quantized = function(library, "lmstate_attend_quantized")
        self._attend_latent = function(library, "lmstate_attend_latent")

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """`ops.rope`."""
        if x.stride(3) != 1:
            x = x.contiguous()
        y = torch.empty(x.shape, dtype=torch.float32)
        cos, sin = cos.contiguous(), sin.contiguous()
        self._rope(pack_rope(x, cos, sin, interleaved, y, threads_for(y.numel())))
        return y

    def can_append(self, k_new: Tensor, v_new: Tensor, k: Stored, v: Stored) -> bool:
        """Whether these dtypes and strides are among those of the body."""
        return (
            k_new.dtype == v_new.dtype == torch.float32
            and k.dtype == v.dtype
            and k.dtype in KINDS
            and k_new.stride(3) == v_new.stride(3) == k.stride(3) == v.stride(3) == 1
        )

    def append(self, k_new: Tensor, v_new: Tensor, k: Stored, v: Stored, starts: Tensor, counts: Tensor) -> None:
        """`ops.append`."""
        starts, counts = integers(starts, "starts", len(k)), integers(counts, "counts", len(k))
        arguments = pack_append(k_new, v_new, k, v, starts, counts, threads_for(k_new.numel()))
        check_appended(self._append(arguments), k_new, k, starts, counts)

    def can_attend(self, q: Tensor, k: Stored, v: Stored) -> bool:
        """Whether these dtypes, head dims and strides are among those of the body."""
        dim, dim_v = k.shape[3], v.shape[3]
        return (
            q.dtype == torch.float32
            and k.dtype == v.dtype
            and k.dtype in KINDS
            and dim % 4 == dim_v % 4 == 0
            and max(dim, dim_v) <= MAX_HEAD_DIM
            and q.stride(3) == k.stride(3) == v.stride(3) == 1
        )

    def attend(
        self,
        q: Tensor,
        k: Stored,
        v: Stored,
        starts: Tensor,
        counts: Tensor,
        params: AttentionParams,
        mask: CausalMask,
        columns: AttentionSums | None = None,
    ) -> Tensor:
        """`ops.attend`, or `ops.attend_observed`."""
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
        starts, counts = integers(starts, "starts", len(q)), integers(counts, "counts", len(q))
        arguments = pack_attend(q, k, v, starts, counts, params, mask, out, columns)
        check_attended(self._attend(arguments), q, k, starts, counts)
        return out

    def rotate_attend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        k: Stored,
        v: Stored,
        starts: Tensor,
        counts: Tensor,
        params: AttentionParams,
        mask: CausalMask,
    ) -> Tensor:
        """`ops.rotate_attend`, in one call."""
        shapes = (q.shape, k_new.shape, (*q.shape[:3], v.shape[3]))
        turned_q, turned_k, out = (torch.empty(shape, dtype=torch.float32) for shape in shapes)
        starts, counts = integers(starts, "starts", len(q)), integers(counts, "counts", len(q))
        cos, sin = cos.contiguous(), sin.contiguous()
        arguments = abi.ROTATE_ATTEND.pack(
            q=pack_rope(q, cos, sin, interleaved, turned_q, threads_for(q.numel())),
            k=pack_rope(k_new, cos, sin, interleaved, turned_k, threads_for(k_new.numel())),
            append=pack_append(turned_k, v_new, k, v, starts, counts, threads_for(k_new.numel())),
            attend=pack_attend(turned_q, k, v, starts, counts, params, mask, out),
        )
        check_attended(self._rotate_attend(arguments), q, k, starts, counts)
        return out

    def can_attend_quantized(self, q: Tensor, kv: QuantizedKV) -> bool:
        """Whether these dtypes and head dims are among those of the body."""
        dim, dim_v = q.shape[-1], kv.v.shape[-1] * 8 // kv.bits
        return (
            q.dtype == torch.float32
            and max(dim, dim_v) <= MAX_HEAD_DIM
            and dim % 4 == dim_v % 4 == 0
            and (kv.tail is None or kv.tail.dtype in KINDS)
        )

    def attend_quantized(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        rotation: RopeTables | None,
        kv: QuantizedKV,
        starts: Tensor,
        counts: Tensor,
        params: AttentionParams,
        mask: CausalMask,
        columns: AttentionSums | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        stores_only: bool = False,
    ) -> Tensor | None:
        """`attend_quantized`, or only what it stores: float32 `[R, T, H, Dv]`, or None.

        Codes may be expanded in `dtype`; beside a tail in that of the tail.
        """
        rows, tokens, heads, dim = q.shape
        (kv_heads, slots), tail = kv.k.shape[1:3], kv.tail
        dim_v = kv.v.shape[3] * 8 // kv.bits
        check_quantized_kv(kv, (rows, kv_heads), dim, dim_v)
        starts, counts = integers(starts, "starts", rows), integers(counts, "counts", rows)
        threads = threads_for(q.numel())
        rotates = b"", b""
        source = 0, 0
        strides_k: Sequence[int] = (0, 0, 0)
        strides_v: Sequence[int] = (0, 0, 0)
        if new is not None:
            k, v = (x if x.stride(3) == 1 else x.contiguous() for x in new)
            if k.shape != (rows, tokens, kv_heads, dim) or v.shape != (rows, tokens, kv_heads, dim_v):
                raise ValueError(f"new keys {list(k.shape)} and values {list(v.shape)} do not fit {list(kv.k.shape)}")
            if rotation is not None:
                cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
                turned_q, turned_k = (torch.empty(x.shape, dtype=torch.float32) for x in (q, k))
                rotates = (
                    pack_rope(q, cos, sin, rotation.interleaved, turned_q, threads),
                    pack_rope(k, cos, sin, rotation.interleaved, turned_k, threads),
                )
                q, k = turned_q, turned_k
            source, strides_k, strides_v = (k.data_ptr(), v.data_ptr()), k.stride()[:3], v.stride()[:3]
        if q.stride(3) != 1 or not (rotates[0] or stores_only):
            q = q.clone(memory_format=torch.contiguous_format)  # it is transformed in place
        out = None if stores_only else torch.empty(rows, tokens, heads, dim_v, dtype=torch.float32)
        ring, (k_row, k_head, k_slot) = (0, (0, 0, 0)) if tail is None else (tail.data_ptr(), tail.stride()[:3])
        (q_row, q_token, q_head), (sums, ends) = q.stride()[:3], column_pointers(columns, kv.k.shape[:3])
        (k_table, v_table), (table_row, block) = table_pointers(tail, None), table_shape(tail)
        biases, distances, bias_token = pack_biases(params, rows, tokens, heads)
        attend = abi.ATTEND.pack(
            q=0 if out is None else q.data_ptr(), k=ring, v=0, starts=starts.data_ptr(), counts=counts.data_ptr(),
            sinks=sinks_pointer(params, heads), slopes=slopes_pointer(params, heads),
            biases=biases, out=0 if out is None else out.data_ptr(), columns=sums, ends=ends,
            k_table=k_table, v_table=v_table, rows=rows, tokens=tokens, heads=heads, kv_heads=kv_heads, slots=slots,
            dim=dim, dim_v=dim_v, q_row=q_row, q_token=q_token, q_head=q_head, k_row=k_row, k_head=k_head,
            k_slot=k_slot, v_row=0, v_head=0, v_slot=0, table_row=table_row, block=block,
            planes=0 if columns is None else columns.sums.shape[2],
            kind=KINDS[dtype if tail is None else tail.dtype], window=mask.window or 0, chunk=mask.chunk or 0,
            threads=torch.get_num_threads(), distances=distances, bias_token=bias_token,
            scale=params.scale, softcap=params.softcap or 0.0,
        )  # fmt: skip
        source_row, source_token, source_head = zip(strides_k, strides_v)
        arguments = abi.ATTEND_QUANTIZED.pack(
            q=rotates[0], k=rotates[1], source=source, source_row=source_row, source_token=source_token,
            source_head=source_head, rotates=bool(rotates[0]), store_threads=threads, codes=pack_codes(kv),
            attend=attend,
        )  # fmt: skip
        check_attended(self._attend_quantized(arguments), q, kv.k, starts, counts)
        return out

    def can_attend_latent(self, q_latent: Tensor, q_rope: Tensor, latent: Stored, rope_key: Stored) -> bool:
        """Whether these dtypes and strides are among those of the body."""
        return (
            q_latent.dtype == q_rope.dtype == torch.float32
            and latent.dtype == rope_key.dtype
            and latent.dtype in KINDS
            and q_latent.stride(3) == q_rope.stride(3) == latent.stride(3) == rope_key.stride(3) == 1
        )

    def attend_latent(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent: Stored,
        rope_key: Stored,
        starts: Tensor,
        counts: Tensor,
        params: AttentionParams,
        window: int | None,
        columns: AttentionSums | None = None,
    ) -> Tensor:
        """`ops.attention.attend_latent`; params: scale and sinks alone."""
        rows, tokens, heads, dim = q_latent.shape
        _, _, slots, rope_dim = rope_key.shape
        if (
            q_rope.shape != (rows, tokens, heads, rope_dim)
            or latent.shape != (rows, 1, slots, dim)
            or rope_key.shape[:2] != (rows, 1)
        ):
            raise ValueError(
                f"queries {list(q_latent.shape)} and {list(q_rope.shape)} do not fit latents {list(latent.shape)} and "
                f"rope keys {list(rope_key.shape)}"
            )
        starts, counts = integers(starts, "starts", rows), integers(counts, "counts", rows)
        out = torch.empty(rows, tokens, heads, dim, dtype=torch.float32)
        (q_row, q_token, q_head, _), (qr_row, qr_token, qr_head, _) = q_latent.stride(), q_rope.stride()
        (latent_table, rope_table), (table_row, block) = table_pointers(latent, rope_key), table_shape(latent)
        sums, ends = column_pointers(columns, (rows, 1, slots))
        arguments = abi.ATTEND_LATENT.pack(
            q=q_latent.data_ptr(), q_rope=q_rope.data_ptr(), latent=latent.data_ptr(), rope=rope_key.data_ptr(),
            starts=starts.data_ptr(), counts=counts.data_ptr(), out=out.data_ptr(), latent_table=latent_table,
            rope_table=rope_table, columns=sums, ends=ends, rows=rows, tokens=tokens, heads=heads, slots=slots,
            dim=dim, rope_dim=rope_dim, planes=0 if columns is None else columns.sums.shape[2],
            q_row=q_row, q_token=q_token, q_head=q_head, qr_row=qr_row, qr_token=qr_token, qr_head=qr_head,
            latent_row=latent.stride(0), latent_slot=latent.stride(2), rope_row=rope_key.stride(0),
            rope_slot=rope_key.stride(2), table_row=table_row, block=block, kind=KINDS[latent.dtype],
            window=window or 0, threads=torch.get_num_threads(), scale=params.scale,
            sinks=sinks_pointer(params, heads),
        )  # fmt: skip
        check_attended(self._attend_latent(arguments), q_latent, latent, starts, counts)
        return out
