"""The calls into a native library: shapes, strides and dtypes are checked here, so that C may trust its pointers.

Arguments travel as one packed structure, field for field the C one of the same name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from struct import Struct
from typing import ClassVar

import torch
from torch import Tensor

from lmstate.ops.norm import Norm
from lmstate.ops.weight import Weight

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_WEIGHT_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}

_LINEAR = Struct("6P6qd")
_ROWS = Struct("3P4qd")
_ROPE = Struct("4P10q")
_APPEND = Struct("6P19q")
_ATTEND = Struct("7P20q2d")
_ROTATE_ATTEND = Struct(_ROPE.format * 2 + _APPEND.format + _ATTEND.format)
_DEQUANTIZE = Struct("3P6q")

MAX_HEAD_DIM = 256
# Below this many numbers a second thread costs more than it saves.
_FEW = 16384


class Library:
    """The bodies of one variant. Every method returns new tensors, float32 and contiguous, except `append`."""

    GATES: ClassVar[dict[str, int]] = {"silu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}

    def __init__(self, variant: str, library: ctypes.CDLL) -> None:
        self.variant = variant
        self._linear = _function(library, "lmstate_linear")
        self._rms_norm = _function(library, "lmstate_rms_norm")
        self._glu = _function(library, "lmstate_glu")
        self._rope = _function(library, "lmstate_rope")
        self._append = _function(library, "lmstate_append")
        self._attend = _function(library, "lmstate_attend")
        self._rotate_attend = _function(library, "lmstate_rotate_attend")
        self._dequantize = _function(library, "lmstate_dequantize")

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        norm: Norm | None,
        gate: int,
        residual: Tensor | None,
    ) -> Tensor:
        """`ops.linear` with a norm (rms, without bias) or a gate (a number of `GATES`; 0: none), not both."""
        n, k = weight.out_features, weight.in_features
        shape = x.shape
        width = 2 * k if gate else k
        if shape[-1] != width:
            raise ValueError(f"x {list(shape)} does not fit {weight}: its last axis must be {width} long")
        x = x.contiguous()
        y = torch.empty(*shape[:-1], n)
        b = w = r = 0
        eps = 0.0
        if bias is not None:
            b = _float_pointer(bias, "bias", (n,))
        if norm is not None:
            w, eps = _float_pointer(norm.weight, "the norm's weight", (k,)), norm.eps
        if residual is not None:
            residual = residual.contiguous()
            r = _float_pointer(residual, "residual", y.shape)
        rows = x.numel() // width
        threads = torch.get_num_threads() if n * k > _FEW else 1
        arguments = _LINEAR.pack(
            x.data_ptr(), weight.storage.data_ptr(), b, w, r, y.data_ptr(),
            rows, n, k, _WEIGHT_KINDS[weight.kind], gate, threads, eps,
        )  # fmt: skip
        if self._linear(arguments):
            raise MemoryError(f"no memory for the activations of {rows} rows of {k}")
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`ops.norm` of kind "rms"."""
        x = x.contiguous()
        y = torch.empty(x.shape)
        width = x.shape[-1]
        w = _float_pointer(weight, "the norm's weight", (width,))
        rows = x.numel() // width if width else 0
        self._rms_norm(_ROWS.pack(x.data_ptr(), w, y.data_ptr(), rows, width, 0, self._threads(x), eps))
        return y

    def glu(self, x: Tensor, act: str) -> Tensor:
        """`ops.glu`, for the activations of `GATES`."""
        x = x.contiguous()
        width = x.shape[-1] // 2
        if x.shape[-1] % 2:
            raise ValueError(f"a gate and what it gates are two halves of an even last axis; this is {list(x.shape)}")
        y = torch.empty(*x.shape[:-1], width)
        rows = y.numel() // width if width else 0
        self._glu(_ROWS.pack(x.data_ptr(), 0, y.data_ptr(), rows, width, self.GATES[act], self._threads(x), 0.0))
        return y

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """`ops.rope`."""
        if x.stride(3) != 1:
            x = x.contiguous()
        y = torch.empty(x.shape)
        cos, sin = cos.contiguous(), sin.contiguous()
        self._rope(_ROPE.pack(*_rope_fields(x, cos, sin, interleaved, y, self._threads(y))))
        return y

    def append(self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, starts: Tensor, counts: Tensor) -> None:
        """`ops.append`."""
        starts, counts = _integers(starts, "starts", len(k)), _integers(counts, "counts", len(k))
        self._append(_APPEND.pack(*_append_fields(k_new, v_new, k, v, starts, counts, self._threads(k_new))))

    def can_append(self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether these dtypes and strides are among those of the body."""
        return (
            k_new.dtype == v_new.dtype == torch.float32
            and k.dtype == v.dtype
            and k.dtype in _KINDS
            and k_new.stride(3) == v_new.stride(3) == k.stride(3) == v.stride(3) == 1
        )

    def can_attend(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether these dtypes, head dims and strides are among those of the body."""
        dim, dim_v = k.shape[3], v.shape[3]
        return (
            q.dtype == torch.float32
            and k.dtype == v.dtype
            and k.dtype in _KINDS
            and dim % 8 == dim_v % 8 == 0
            and max(dim, dim_v) <= MAX_HEAD_DIM
            and q.stride(3) == k.stride(3) == v.stride(3) == 1
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        counts: Tensor,
        scale: float,
        window: int | None,
        chunk: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """`ops.attend`."""
        out = torch.empty(*q.shape[:3], v.shape[3])
        starts, counts = _integers(starts, "starts", len(q)), _integers(counts, "counts", len(q))
        fields = _attend_fields(q, k, v, starts, counts, scale, window, chunk, softcap, sinks, out)
        _check_attended(self._attend(_ATTEND.pack(*fields)), q, k, starts, counts)
        return out

    def rotate_attend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        counts: Tensor,
        scale: float,
        window: int | None,
        chunk: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """`ops.rotate_attend`, in one call."""
        turned_q, turned_k, out = torch.empty(q.shape), torch.empty(k_new.shape), torch.empty(*q.shape[:3], v.shape[3])
        starts, counts = _integers(starts, "starts", len(q)), _integers(counts, "counts", len(q))
        cos, sin = cos.contiguous(), sin.contiguous()
        arguments = _ROTATE_ATTEND.pack(
            *_rope_fields(q, cos, sin, interleaved, turned_q, self._threads(q)),
            *_rope_fields(k_new, cos, sin, interleaved, turned_k, self._threads(k_new)),
            *_append_fields(turned_k, v_new, k, v, starts, counts, self._threads(k_new)),
            *_attend_fields(turned_q, k, v, starts, counts, scale, window, chunk, softcap, sinks, out),
        )
        _check_attended(self._rotate_attend(arguments), q, k, starts, counts)
        return out

    def dequantize(self, weight: Weight, dtype: torch.dtype, first: int, count: int) -> Tensor:
        """Outputs first..first + count of a quantised weight, float32 or bfloat16 `[count, K]`."""
        y = torch.empty(count, weight.in_features, dtype=dtype)
        self._expand(weight, None, y, first)
        return y

    def rows(self, weight: Weight, ids: Tensor) -> Tensor:
        """Outputs `ids` (int64, any shape) of a quantised weight, float32 `[..., K]`."""
        ids = ids.contiguous()
        if ids.dtype != torch.int64:
            raise ValueError(f"ids are int64; these are {ids.dtype}")
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= weight.out_features):
            raise IndexError(
                f"ids must lie in 0..{weight.out_features - 1}; these reach {int(ids.min())}..{int(ids.max())}"
            )
        y = torch.empty(*ids.shape, weight.in_features)
        self._expand(weight, ids, y, 0)
        return y

    def _expand(self, weight: Weight, ids: Tensor | None, y: Tensor, first: int) -> None:
        k = weight.in_features
        bits = 4 if weight.kind == "int4" else 8
        arguments = _DEQUANTIZE.pack(
            weight.storage.data_ptr(),
            0 if ids is None else ids.data_ptr(),
            y.data_ptr(),
            first,
            y.numel() // k if k else 0,
            k,
            bits,
            _KINDS[y.dtype],
            self._threads(y),
        )  # fmt: skip
        self._dequantize(arguments)

    @staticmethod
    def _threads(x: Tensor) -> int:
        return torch.get_num_threads() if x.numel() > _FEW else 1


def _function(library: ctypes.CDLL, name: str) -> Callable[[bytes], int]:
    function = library[name]
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int64
    return function


def _float_pointer(x: Tensor, name: str, shape: tuple[int, ...]) -> int:
    if x.shape != shape or x.dtype != torch.float32 or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(
            f"{name} must be contiguous float32 {list(shape)} on the processor; "
            f"this is {x.dtype} {list(x.shape)} on {x.device}"
        )
    return x.data_ptr()


def _integers(x: Tensor, name: str, rows: int) -> Tensor:
    if x.shape != (rows,) or x.dtype != torch.int64 or not x.is_cpu:
        raise ValueError(
            f"{name} must be int64 [{rows}] on the processor; this is {x.dtype} {list(x.shape)} on {x.device}"
        )
    return x.contiguous()


def _rope_fields(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, y: Tensor, threads: int) -> tuple[int, ...]:
    """x `[R, T, H, D]` of any strides but the last; y the same shape, contiguous."""
    rows, tokens, heads, dim = x.shape
    half = cos.shape[-1]
    if 2 * half > dim:
        raise ValueError(f"a head of {dim} has no {2 * half} features to rotate")
    shape = (rows, tokens, half)
    c, s = _float_pointer(cos, "cos", shape), _float_pointer(sin, "sin", shape)
    row, token, head, _ = x.stride()
    return x.data_ptr(), c, s, y.data_ptr(), rows, tokens, heads, dim, half, interleaved, row, token, head, threads


def _append_fields(
    k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, starts: Tensor, counts: Tensor, threads: int
) -> tuple[int, ...]:
    rows, tokens, kv_heads, dim = k_new.shape
    slots, dim_v = k.shape[2], v.shape[3]
    if k.shape != (rows, kv_heads, slots, dim) or v.shape != (rows, kv_heads, slots, dim_v):
        raise ValueError(f"new keys {list(k_new.shape)} do not fit rings k {list(k.shape)}, v {list(v.shape)}")
    if v_new.shape != (rows, tokens, kv_heads, dim_v):
        raise ValueError(
            f"new values {list(v_new.shape)} do not fit new keys {list(k_new.shape)} and v {list(v.shape)}"
        )
    if tokens > slots and int(counts.max()) > slots:
        raise ValueError(f"{int(counts.max())} new tokens do not fit a ring of {slots} slots: store fewer at a time")
    fk, fv, tk, tv = k_new.stride(), v_new.stride(), k.stride(), v.stride()
    return (
        k_new.data_ptr(), v_new.data_ptr(), k.data_ptr(), v.data_ptr(), starts.data_ptr(), counts.data_ptr(),
        rows, kv_heads, slots, _KINDS[k.dtype], threads, dim, dim_v,
        fk[0], fv[0], fk[1], fv[1], fk[2], fv[2], tk[0], tv[0], tk[1], tv[1], tk[2], tv[2],
    )  # fmt: skip


def _attend_fields(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> tuple[float, ...]:
    rows, tokens, heads, dim = q.shape
    _, kv_heads, slots, dim_v = v.shape
    if k.shape != (rows, kv_heads, slots, dim) or v.shape[0] != rows or heads % kv_heads:
        raise ValueError(f"queries {list(q.shape)} do not fit rings k {list(k.shape)}, v {list(v.shape)}")
    s = 0 if sinks is None else _float_pointer(sinks, "sinks", (heads,))
    sq, sk, sv = q.stride(), k.stride(), v.stride()
    return (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), starts.data_ptr(), counts.data_ptr(), s, out.data_ptr(),
        rows, tokens, heads, kv_heads, slots, dim, dim_v,
        sq[0], sq[1], sq[2], sk[0], sk[1], sk[2], sv[0], sv[1], sv[2],
        _KINDS[k.dtype], window or 0, chunk or 0, torch.get_num_threads(), scale, softcap or 0.0,
    )  # fmt: skip


def _check_attended(status: int, q: Tensor, k: Tensor, starts: Tensor, counts: Tensor) -> None:
    """The C side's verdict as an error: no memory, or the row whose starts and counts make no sense."""
    if status < 0:
        raise MemoryError(f"no memory for the parts of the attention of {len(q)} rows")
    if status:
        r = status - 1
        raise ValueError(
            f"row {r} starts at {int(starts[r])} with {int(counts[r])} new tokens: that does not fit queries "
            f"{list(q.shape)} over a ring of {k.shape[2]} slots (all that they see must lie in it at once)"
        )
