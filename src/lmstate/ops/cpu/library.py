"""The calls into a native library: shapes, strides and dtypes are checked here, so that C may trust its pointers.

Arguments travel as one packed structure, field for field the C one of the same name.
"""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lmstate.ops.cpu.arguments import (
    KINDS,
    MAX_HEAD_DIM,
    WEIGHT_KINDS,
    append_fields,
    attend_fields,
    check_attended,
    float_pointer,
    function,
    integers,
    joining,
    rope_fields,
)
from lmstate.ops.cpu.fused import Fused
from lmstate.ops.norm import Norm
from lmstate.ops.residual import Residual
from lmstate.ops.scoring import Scoring, Sight
from lmstate.ops.weight import Weight

if TYPE_CHECKING:
    from lmstate.ops.attend_slots import Columns

_LINEAR = Struct("7P6q3dP")
_ROWS = Struct("3P6qd")
_ROPE = Struct("4P10q")
_APPEND = Struct("6P19q")
_ATTEND = Struct("9P21q2d")
_ROTATE_ATTEND = Struct(_ROPE.format * 2 + _APPEND.format + _ATTEND.format)
_BEST = Struct("3P3q")
_DEQUANTIZE = Struct("3P7q")
_SQUEEZE = Struct("2P3q")
_COUNT = Struct("2P2q")

# Below this many numbers a second thread costs more than it saves.
_FEW = 16384


class Library:
    """The bodies of one variant. Every method returns new tensors, float32 and contiguous, except `append`."""

    GATES: ClassVar[dict[str, int]] = {
        "silu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "swigluoai": 5
    }  # fmt: skip

    def __init__(self, variant: str, library: ctypes.CDLL) -> None:
        self.variant = variant
        self.fused = Fused(library)
        self._linear = function(library, "lmstate_linear")
        self._rms_norm = function(library, "lmstate_rms_norm")
        self._glu = function(library, "lmstate_glu")
        self._rope = function(library, "lmstate_rope")
        self._append = function(library, "lmstate_append")
        self._attend = function(library, "lmstate_attend")
        self._rotate_attend = function(library, "lmstate_rotate_attend")
        self._best = function(library, "lmstate_best")
        self._dequantize = function(library, "lmstate_dequantize")
        self.multiplies = bool(function(library, "lmstate_multiplies")(b""))
        """Whether bfloat16 weights, keys and values multiply what is rounded to bfloat16 too, in pairs."""
        self._count_high_bytes = function(library, "lmstate_count_high_bytes")
        self._squeeze = function(library, "lmstate_squeeze")

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        norm: Norm | None,
        gate: int,
        residual: Residual | None,
    ) -> Tensor:
        """`ops.linear` with norms (rms, without bias) or a gate (a number of `GATES`; 0: none), not both before it."""
        n, k = weight.out_features, weight.in_features
        shape = x.shape
        width = 2 * k if gate else k
        if shape[-1] != width:
            raise ValueError(f"x {list(shape)} does not fit {weight}: its last axis must be {width} long")
        x = x.contiguous()
        y = torch.empty(*shape[:-1], n, dtype=torch.float32)
        b = w = r = 0
        eps = 0.0
        if bias is not None:
            b = float_pointer(bias, "bias", (n,))
        if norm is not None:
            w, eps = float_pointer(norm.weight, "the norm's weight", (k,)), norm.eps
        if residual is not None:
            stream = residual.stream.contiguous()
            r = float_pointer(stream, "residual", y.shape)
        after, after_eps, scale = joining(residual, n)
        rows = x.numel() // width
        threads = torch.get_num_threads() if n * k > _FEW else 1
        arguments = _LINEAR.pack(
            x.data_ptr(), weight.storage.data_ptr(), b, w, r, after, y.data_ptr(),
            rows, n, k, WEIGHT_KINDS[weight.kind], gate, threads, eps, after_eps, scale, 0,
        )  # fmt: skip
        if self._linear(arguments):
            raise MemoryError(f"no memory for the activations of {rows} rows of {k}")
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """`ops.norm` of kind "rms", rounded to float32 or bfloat16."""
        x = x.contiguous()
        y = torch.empty(x.shape, dtype=dtype)
        width = x.shape[-1]
        w = float_pointer(weight, "the norm's weight", (width,))
        rows = x.numel() // width if width else 0
        threads = self._threads(x)
        self._rms_norm(_ROWS.pack(x.data_ptr(), w, y.data_ptr(), rows, width, 0, 0, KINDS[dtype], threads, eps))
        return y

    def glu(self, x: Tensor, act: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """`ops.glu`, for the activations of `GATES`, from float32 or bfloat16 and rounded to either."""
        x = x.contiguous()
        width = x.shape[-1] // 2
        if x.shape[-1] % 2:
            raise ValueError(f"a gate and what it gates are two halves of an even last axis; this is {list(x.shape)}")
        y = torch.empty(*x.shape[:-1], width, dtype=dtype)
        rows = y.numel() // width if width else 0
        kinds, threads = (KINDS[x.dtype], KINDS[dtype]), self._threads(x)
        self._glu(_ROWS.pack(x.data_ptr(), 0, y.data_ptr(), rows, width, self.GATES[act], *kinds, threads, 0.0))
        return y

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`ops.best`."""
        x = x.contiguous()
        rows, width = x.shape
        if width == 0:
            raise ValueError("a row without numbers has no largest one")
        largest, where = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64)
        pointers = float_pointer(x, "x", x.shape), largest.data_ptr(), where.data_ptr()
        self._best(_BEST.pack(*pointers, rows, width, self._threads(x)))
        return largest, where

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """`ops.rope`."""
        if x.stride(3) != 1:
            x = x.contiguous()
        y = torch.empty(x.shape, dtype=torch.float32)
        cos, sin = cos.contiguous(), sin.contiguous()
        self._rope(_ROPE.pack(*rope_fields(x, cos, sin, interleaved, y, self._threads(y))))
        return y

    def append(self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, starts: Tensor, counts: Tensor) -> None:
        """`ops.append`."""
        starts, counts = integers(starts, "starts", len(k)), integers(counts, "counts", len(k))
        self._append(_APPEND.pack(*append_fields(k_new, v_new, k, v, starts, counts, self._threads(k_new))))

    def can_append(self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether these dtypes and strides are among those of the body."""
        return (
            k_new.dtype == v_new.dtype == torch.float32
            and k.dtype == v.dtype
            and k.dtype in KINDS
            and k_new.stride(3) == v_new.stride(3) == k.stride(3) == v.stride(3) == 1
        )

    def can_attend(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
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
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        counts: Tensor,
        scoring: Scoring,
        sight: Sight,
        columns: Columns | None = None,
    ) -> Tensor:
        """`ops.attend`, or `ops.attend_observed`."""
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
        starts, counts = integers(starts, "starts", len(q)), integers(counts, "counts", len(q))
        fields = attend_fields(q, k, v, starts, counts, scoring, sight, out, columns)
        check_attended(self._attend(_ATTEND.pack(*fields)), q, k, starts, counts)
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
        scoring: Scoring,
        sight: Sight,
    ) -> Tensor:
        """`ops.rotate_attend`, in one call."""
        shapes = (q.shape, k_new.shape, (*q.shape[:3], v.shape[3]))
        turned_q, turned_k, out = (torch.empty(shape, dtype=torch.float32) for shape in shapes)
        starts, counts = integers(starts, "starts", len(q)), integers(counts, "counts", len(q))
        cos, sin = cos.contiguous(), sin.contiguous()
        arguments = _ROTATE_ATTEND.pack(
            *rope_fields(q, cos, sin, interleaved, turned_q, self._threads(q)),
            *rope_fields(k_new, cos, sin, interleaved, turned_k, self._threads(k_new)),
            *append_fields(turned_k, v_new, k, v, starts, counts, self._threads(k_new)),
            *attend_fields(turned_q, k, v, starts, counts, scoring, sight, out),
        )
        check_attended(self._rotate_attend(arguments), q, k, starts, counts)
        return out

    def dequantize(self, weight: Weight, first: int, out: Tensor) -> None:
        """Outputs first.. of a quantised weight into `out` `[count, K]`, float32 or bfloat16."""
        count, k = out.shape
        if k != weight.in_features or not 0 <= first <= weight.out_features - count or not out.is_contiguous():
            raise ValueError(f"a panel {list(out.shape)} from output {first} on does not fit {weight}")
        self._expand(weight, None, out, first)

    def rows(self, weight: Weight, ids: Tensor) -> Tensor:
        """Outputs `ids` (int64, any shape) of a quantised weight, float32 `[..., K]`."""
        ids = ids.contiguous()
        if ids.dtype != torch.int64:
            raise ValueError(f"ids are int64; these are {ids.dtype}")
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= weight.out_features):
            raise IndexError(
                f"ids must lie in 0..{weight.out_features - 1}; these reach {int(ids.min())}..{int(ids.max())}"
            )
        y = torch.empty(*ids.shape, weight.in_features, dtype=torch.float32)
        self._expand(weight, ids, y, 0)
        return y

    def high_bytes(self, matrix: Tensor) -> Tensor:
        """How often each upper byte stands in a contiguous bfloat16 matrix, int64 `[256]`."""
        seen = torch.zeros(256, dtype=torch.int64)
        self._count_high_bytes(
            _COUNT.pack(_half_pointer(matrix), seen.data_ptr(), matrix.numel(), self._threads(matrix))
        )
        return seen

    def squeeze(self, matrix: Tensor, packed: Tensor) -> None:
        """Fill in what `ops.squeezed` lays out, whose table is there, for a bfloat16 matrix `[N, K]`."""
        self._squeeze(_SQUEEZE.pack(_half_pointer(matrix), packed.data_ptr(), *matrix.shape, self._threads(matrix)))

    def _expand(self, weight: Weight, ids: Tensor | None, y: Tensor, first: int) -> None:
        k = weight.in_features
        arguments = _DEQUANTIZE.pack(
            weight.storage.data_ptr(),
            0 if ids is None else ids.data_ptr(),
            y.data_ptr(),
            first,
            y.numel() // k if k else 0,
            weight.out_features,
            k,
            WEIGHT_KINDS[weight.kind],
            KINDS[y.dtype],
            self._threads(y),
        )  # fmt: skip
        self._dequantize(arguments)

    @staticmethod
    def _threads(x: Tensor) -> int:
        return torch.get_num_threads() if x.numel() > _FEW else 1


def _half_pointer(matrix: Tensor) -> int:
    if matrix.dtype != torch.bfloat16 or not matrix.is_contiguous() or not matrix.is_cpu:
        raise ValueError(f"a matrix to squeeze is contiguous bfloat16; this is {matrix.dtype} {list(matrix.shape)}")
    return matrix.data_ptr()
