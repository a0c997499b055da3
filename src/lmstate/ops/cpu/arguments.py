"""Functions of a native library by name, and the checks that let C trust its pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from lmstate.ops.cpu import abi
from lmstate.ops.cpu.abi import KINDS
from lmstate.ops.types import kv_format
from lmstate.ops.types.block_table import BLOCK_TOKENS, BlockTable, Stored
from lmstate.ops.types.params import AttentionParams, AttentionSums, CausalMask, Norm, QuantizedKV, Residual


def function(library: ctypes.CDLL, name: str) -> Callable[[bytes], int]:
    function = library[name]
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int64
    return function


def float_pointer(x: Tensor, name: str, shape: tuple[int, ...]) -> int:
    if x.shape != shape or x.dtype != torch.float32 or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(
            f"{name} must be contiguous float32 {list(shape)} on the processor; "
            f"this is {x.dtype} {list(x.shape)} on {x.device}"
        )
    return x.data_ptr()


def optional_pointer(x: Tensor | None, name: str, shape: tuple[int, ...]) -> int:
    return 0 if x is None else float_pointer(x, name, shape)


def norm_fields(norm: Norm | None, width: int) -> tuple[int, float]:
    """Pointer to the weight and epsilon of a norm, 0 where there is none."""
    return (0, 0.0) if norm is None else (float_pointer(norm.weight, "the norm's weight", (width,)), norm.eps)


def threads_for(elements: int) -> int:
    """Threads for that many: for fewer than these a second one costs more than it saves."""
    return torch.get_num_threads() if elements > 16384 else 1


def simple(*norms: Norm | None) -> bool:
    """Whether the native bodies know them all."""
    return all(norm is None or norm.simple for norm in norms)


def factor(scale: float) -> float:
    """0 where there is none; a factor of 0 is the least that is not 0, by which nothing of an output is seen either."""
    return 0.0 if scale == 1.0 else scale or torch.finfo(torch.float32).tiny


def joining(residual: Residual | None, width: int) -> tuple[int, float, float]:
    """Beside the stream: the norm before it, and the factor; 0 where there is none."""
    return (0, 0.0, 0.0) if residual is None else (*norm_fields(residual.norm, width), factor(residual.scale))


def integers(x: Tensor, name: str, rows: int) -> Tensor:
    if x.shape != (rows,) or x.dtype != torch.int64 or not x.is_cpu:
        raise ValueError(
            f"{name} must be int64 [{rows}] on the processor; this is {x.dtype} {list(x.shape)} on {x.device}"
        )
    return x.contiguous()


def pack_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, y: Tensor, threads: int) -> bytes:
    """x `[R, T, H, D]` of any strides but the last; y the same shape, contiguous."""
    rows, tokens, heads, dim = x.shape
    half = cos.shape[-1]
    if 2 * half > dim:
        raise ValueError(f"a head of {dim} has no {2 * half} features to rotate")
    shape = (rows, tokens, half)
    c, s = float_pointer(cos, "cos", shape), float_pointer(sin, "sin", shape)
    row, token, head, _ = x.stride()
    return abi.ROPE.pack(
        x=x.data_ptr(), cos=c, sin=s, y=y.data_ptr(), rows=rows, tokens=tokens, heads=heads, dim=dim, half=half,
        interleaved=interleaved, x_row=row, x_token=token, x_head=head, threads=threads,
    )  # fmt: skip


def pack_append(
    k_new: Tensor, v_new: Tensor, k: Stored, v: Stored, starts: Tensor, counts: Tensor, threads: int
) -> bytes:
    rows, tokens, kv_heads, dim = k_new.shape
    slots, dim_v = k.shape[2], v.shape[3]
    if k.shape != (rows, kv_heads, slots, dim) or v.shape != (rows, kv_heads, slots, dim_v):
        raise ValueError(f"new keys {list(k_new.shape)} do not fit rings k {list(k.shape)}, v {list(v.shape)}")
    if v_new.shape != (rows, tokens, kv_heads, dim_v):
        raise ValueError(
            f"new values {list(v_new.shape)} do not fit new keys {list(k_new.shape)} and v {list(v.shape)}"
        )
    fk, fv, tk, tv = k_new.stride(), v_new.stride(), k.stride(), v.stride()
    table_row, block = table_shape(k)
    return abi.APPEND.pack(
        source=(k_new.data_ptr(), v_new.data_ptr()), to=(k.data_ptr(), v.data_ptr()), starts=starts.data_ptr(),
        counts=counts.data_ptr(), tables=table_pointers(k, v), rows=rows, tokens=tokens, kv_heads=kv_heads,
        slots=slots, kind=KINDS[k.dtype], threads=threads, table_row=table_row, block=block, dim=(dim, dim_v),
        source_row=(fk[0], fv[0]), source_token=(fk[1], fv[1]), source_head=(fk[2], fv[2]),
        to_row=(tk[0], tv[0]), to_head=(tk[1], tv[1]), to_slot=(tk[2], tv[2]),
    )  # fmt: skip


def pack_attend(
    q: Tensor,
    k: Stored,
    v: Stored,
    starts: Tensor,
    counts: Tensor,
    params: AttentionParams,
    mask: CausalMask,
    out: Tensor,
    columns: AttentionSums | None = None,
) -> bytes:
    rows, tokens, heads, dim = q.shape
    _, kv_heads, slots, dim_v = v.shape
    if k.shape != (rows, kv_heads, slots, dim) or v.shape[0] != rows or heads % kv_heads:
        raise ValueError(f"queries {list(q.shape)} do not fit rings k {list(k.shape)}, v {list(v.shape)}")
    q_row, q_token, q_head, _ = q.stride()
    k_row, k_head, k_slot, _ = k.stride()
    v_row, v_head, v_slot, _ = v.stride()
    sums, ends = column_pointers(columns, k.shape[:3])
    k_table, v_table = table_pointers(k, v)
    table_row, block = table_shape(k)
    biases, distances, bias_token = pack_biases(params, rows, tokens, heads)
    return abi.ATTEND.pack(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), starts=starts.data_ptr(), counts=counts.data_ptr(),
        sinks=sinks_pointer(params, heads), slopes=slopes_pointer(params, heads),
        biases=biases, out=out.data_ptr(), columns=sums, ends=ends, k_table=k_table,
        v_table=v_table, rows=rows, tokens=tokens, heads=heads, kv_heads=kv_heads, slots=slots, dim=dim, dim_v=dim_v,
        q_row=q_row, q_token=q_token, q_head=q_head, k_row=k_row, k_head=k_head, k_slot=k_slot, v_row=v_row,
        v_head=v_head, v_slot=v_slot, table_row=table_row, block=block,
        planes=0 if columns is None else columns.sums.shape[2], kind=KINDS[k.dtype],
        window=mask.window or 0, chunk=mask.chunk or 0, threads=torch.get_num_threads(),
        distances=distances, bias_token=bias_token, scale=params.scale,
        softcap=params.softcap or 0.0,
    )  # fmt: skip


def table_pointers(*stored: Stored | None) -> tuple[int, ...]:
    """Of blocks, where their tables are; 0 where they are rings. ValueError where they do not go together."""
    if any(isinstance(x, BlockTable) and not x.pointers.flags.c_contiguous for x in stored):
        raise ValueError("the rows of a block table must follow each other")
    if len({table_shape(x) for x in stored if x is not None}) > 1:
        raise ValueError("blocks and rings, or tables of other shapes, were given together")
    return tuple(x.address if isinstance(x, BlockTable) else 0 for x in stored)


def table_shape(x: Stored | None) -> tuple[int, int]:
    """Entries from row to row, and the positions of a block; 0 for rings."""
    return (x.pointers.shape[1], BLOCK_TOKENS) if isinstance(x, BlockTable) else (0, 0)


def column_pointers(columns: AttentionSums | None, slots: tuple[int, ...]) -> tuple[int, int]:
    """Of the sums over slots `[R, K, S]`, and of the ends."""
    if columns is None:
        return 0, 0
    rows, kv_heads, count = slots
    sums = float_pointer(columns.sums, "columns", (rows, kv_heads, columns.sums.shape[2], count))
    if not columns.ends.is_contiguous():  # a copy would not live through the call
        raise ValueError("the ends of columns must be contiguous")
    return sums, integers(columns.ends, "ends", rows).data_ptr()


def sinks_pointer(params: AttentionParams, heads: int) -> int:
    return 0 if params.sinks is None else float_pointer(params.sinks, "sinks", (heads,))


def slopes_pointer(params: AttentionParams, heads: int) -> int:
    return 0 if params.slopes is None else float_pointer(params.slopes, "slopes", (heads,))


def pack_biases(params: AttentionParams, rows: int, tokens: int, heads: int) -> tuple[int, int, int]:
    """Address of the biases, number of their distances, and numbers from one token to the next."""
    if params.biases is None:
        return 0, 0, 0
    distances = params.biases.shape[-1]
    if params.biases.ndim == 2:
        return float_pointer(params.biases, "biases", (heads, distances)), distances, 0
    return float_pointer(params.biases, "biases", (rows, tokens, heads, distances)), distances, heads * distances


def check_appended(status: int, k_new: Tensor, k: Stored, starts: Tensor, counts: Tensor) -> None:
    """ValueError where the C side says that a row's start and count do not fit."""
    if status:
        r, tokens, slots = status - 1, k_new.shape[1], k.shape[2]
        raise ValueError(
            f"row {r} starts at {int(starts[r])}: {int(counts[r])} new tokens do not fit a ring of {slots} slots or a "
            f"step of {tokens}; starts and counts are not negative"
        )


def check_attended(status: int, q: Tensor, k: Stored, starts: Tensor, counts: Tensor) -> None:
    """The status of a C call as an error: no memory, or the row whose starts and counts make no sense."""
    if status < 0:
        raise MemoryError(f"no memory for the parts of the attention of {len(q)} rows")
    if status:
        r = status - 1
        raise ValueError(
            f"row {r} starts at {int(starts[r])} with {int(counts[r])} new tokens: that does not fit queries "
            f"{list(q.shape)} over a ring of {k.shape[2]} slots (all that they see must lie in it at once)"
        )


def contiguous(x: Stored) -> bool:
    """Whether the slots follow each other, or blocks do that have no gaps."""
    return isinstance(x, BlockTable) or x.is_contiguous()


def pack_codes(kv: QuantizedKV) -> bytes:
    """Codes and scales, which `check_quantized_kv` accepts."""
    k, v, k_scale, v_scale = (x.data_ptr() for x in kv.tensors)
    k_table, v_table, k_scale_table, v_scale_table = table_pointers(*kv.tensors)
    table_row, block = table_shape(kv.k)
    return abi.CODES.pack(
        k=k, v=v, k_scale=k_scale, v_scale=v_scale, k_table=k_table, v_table=v_table, k_scale_table=k_scale_table,
        v_scale_table=v_scale_table, bits=kv.bits, tail=0 if kv.tail is None else kv.tail.shape[2],
        table_row=table_row, block=block,
    )  # fmt: skip


def check_quantized_kv(kv: QuantizedKV, rows: tuple[int, int], dim: int, dim_v: int) -> None:
    """ValueError where these do not fit `(R, K)` and widths of keys and of values."""
    slots, bits, tail = kv.k.shape[2], kv.bits, kv.tail
    k_scales = 1 if tail is None else kv_format.block_scales(dim)
    expected = {
        "k": (kv.k, dim * bits // 8, kv_format.code_dtype(bits)),
        "v": (kv.v, dim_v * bits // 8, kv_format.code_dtype(bits)),
        "k_scale": (kv.k_scale, k_scales, torch.float16),
        "v_scale": (kv.v_scale, 1, torch.float16),
    }
    for name, (tensor, width, dtype) in expected.items():
        if tensor.shape != (*rows, slots, width) or tensor.dtype != dtype or not contiguous(tensor):
            raise ValueError(
                f"{name} must be contiguous {dtype} {[*rows, slots, width]}; "
                f"this is {tensor.dtype} {list(tensor.shape)}"
            )
    if tail is not None:
        if slots % kv_format.BLOCK:
            raise ValueError(f"blocks of {kv_format.BLOCK} positions cannot lie in {slots} slots")
        if (*tail.shape[:2], tail.shape[3]) != (*rows, dim) or tail.stride(3) != 1:
            raise ValueError(f"the tail is {list(tail.shape)}; keys of {dim} do not fit it")
