"""Products with weights, norms, gates and conversions: shapes and dtypes are checked here, so that C may trust them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lmstate.ops.cpu import abi
from lmstate.ops.cpu.abi import GATES, KINDS, WEIGHT_KINDS, Kind, product_kind
from lmstate.ops.cpu.arguments import float_pointer, function, joining, threads_for
from lmstate.ops.types.params import Norm, Residual
from lmstate.ops.types.weight import Weight


class DenseBodies:
    """The bodies of one variant. Every method returns new tensors, contiguous, or fills those that it is given."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear = function(library, "lmstate_linear")
        self._rms_norm = function(library, "lmstate_rms_norm")
        self._glu = function(library, "lmstate_glu")
        self._argmax = function(library, "lmstate_argmax")
        self._sample = function(library, "lmstate_sample")
        self._per_head_matmul = function(library, "lmstate_per_head_matmul")
        self._dequantize = function(library, "lmstate_dequantize")
        self._count_high_bytes = function(library, "lmstate_count_high_bytes")
        self._to_bfloat12 = function(library, "lmstate_to_bfloat12")
        self.rounds_to_bf16 = bool(function(library, "lmstate_rounds_to_bf16")(b""))
        """Whether bfloat16 weights, keys and values multiply what is rounded to bfloat16 too."""
        self.uses_amx = bool(function(library, "lmstate_uses_amx")(b""))
        """Whether products go in tiles of AMX."""

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        norm: Norm | None,
        gate: int,
        residual: Residual | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`ops.linear` with norms (rms, without bias) or a gate (of `GateKind`), not both before it."""
        n, k = weight.out_features, weight.in_features
        shape = x.shape
        width = 2 * k if gate else k
        if shape[-1] != width or x.dtype != torch.float32:
            raise ValueError(f"x {x.dtype} {list(shape)} does not fit {weight}: x is float32 of {width} features")
        x = x.contiguous()
        y = torch.empty(*shape[:-1], n, dtype=torch.float32) if out is None else out
        if y.shape != (*shape[:-1], n) or y.dtype != torch.float32 or not y.is_contiguous():
            raise ValueError(f"out {y.dtype} {list(y.shape)} is not contiguous float32 {[*shape[:-1], n]}")
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
        threads = threads_for(n * k)
        arguments = abi.LINEAR.pack(
            x=x.data_ptr(), weight=weight.storage.data_ptr(), bias=b, norm=w, residual=r, after=after, y=y.data_ptr(),
            rows=rows, outputs=n, inputs=k, kind=product_kind(weight), gate=gate, threads=threads,
            eps=eps, after_eps=after_eps, scale=scale, factors=0, begin=0, end=0, glu=0, y_row=0, rest=0, rest_begin=0,
            rest_row=0,
        )  # fmt: skip
        if self._linear(arguments):
            raise MemoryError(f"no memory for the activations of {rows} rows of {k}")
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """`ops.norm` of kind "rms" of a float32 x, rounded to float32 or bfloat16."""
        if x.dtype != torch.float32 or dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the norm takes float32 and gives float32 or bfloat16, not {x.dtype} and {dtype}")
        x = x.contiguous()
        y = torch.empty(x.shape, dtype=dtype)
        width = x.shape[-1]
        w = float_pointer(weight, "the norm's weight", (width,))
        rows = x.numel() // width if width else 0
        threads = threads_for(x.numel())
        arguments = abi.ROWS.pack(
            x=x.data_ptr(), weight=w, y=y.data_ptr(), rows=rows, width=width, gate=0, x_kind=Kind.F32,
            y_kind=KINDS[dtype], threads=threads, eps=eps,
        )  # fmt: skip
        self._rms_norm(arguments)
        return y

    def glu(self, x: Tensor, act: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """`ops.glu`, for the activations of `GATES`, from float32 or bfloat16 and rounded to either."""
        x = x.contiguous()
        width = x.shape[-1] // 2
        if not {x.dtype, dtype} <= {torch.float32, torch.bfloat16}:
            raise ValueError(f"a gate takes and gives float32 or bfloat16, not {x.dtype} and {dtype}")
        if x.shape[-1] % 2:
            raise ValueError(f"a gate and what it gates are two halves of an even last axis; this is {list(x.shape)}")
        y = torch.empty(*x.shape[:-1], width, dtype=dtype)
        rows = y.numel() // width if width else 0
        arguments = abi.ROWS.pack(
            x=x.data_ptr(), weight=0, y=y.data_ptr(), rows=rows, width=width, gate=GATES[act],
            x_kind=KINDS[x.dtype], y_kind=KINDS[dtype], threads=threads_for(x.numel()), eps=0.0,
        )  # fmt: skip
        self._glu(arguments)
        return y

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`ops.argmax`."""
        x = x.contiguous()
        rows, width = x.shape
        if width == 0:
            raise ValueError("a row without elements has no largest one")
        largest, where = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64)
        arguments = abi.ARGMAX.pack(
            x=float_pointer(x, "x", x.shape), largest=largest.data_ptr(), where=where.data_ptr(), rows=rows,
            width=width, threads=threads_for(x.numel()),
        )  # fmt: skip
        self._argmax(arguments)
        return largest, where

    def sample(
        self,
        logits: Tensor,
        uniform: Tensor,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        min_p: float | None,
    ) -> Tensor:
        """`ops.sample`."""
        x = logits.contiguous()
        rows, width = x.shape
        if uniform.shape != (rows,) or uniform.dtype != torch.float64 or not uniform.is_cpu:
            raise ValueError(f"{rows} rows take float64 [{rows}]; this is {uniform.dtype} {list(uniform.shape)}")
        if width == 0:
            raise ValueError("a row without elements has nothing to draw")
        uniform, picked = uniform.contiguous(), torch.empty(rows, dtype=torch.int64)
        arguments = abi.SAMPLE.pack(
            x=float_pointer(x, "logits", x.shape), uniform=uniform.data_ptr(), picked=picked.data_ptr(), rows=rows,
            width=width, top_k=top_k if top_k is not None and top_k < width else 0,
            threads=min(threads_for(x.numel()), max(rows, 1)), temperature=temperature,
            top_p=1.0 if top_p is None else top_p, min_p=min_p or 0.0,
        )  # fmt: skip
        if self._sample(arguments):
            raise MemoryError(f"no memory to draw from {width} logits")
        return picked

    def dequantize(self, weight: Weight, first: int, out: Tensor) -> None:
        """Outputs first.. of a quantized weight into `out` `[count, K]`, float32 or bfloat16."""
        count, k = out.shape
        if k != weight.in_features or not 0 <= first <= weight.out_features - count or not out.is_contiguous():
            raise ValueError(f"a panel {list(out.shape)} from output {first} on does not fit {weight}")
        self._expand(weight, None, out, first)

    def rows(self, weight: Weight, ids: Tensor) -> Tensor:
        """Outputs `ids` (int64, any shape) of a quantized weight, float32 `[..., K]`."""
        ids = ids.contiguous()
        if ids.dtype != torch.int64:
            raise ValueError(f"ids are int64; these are {ids.dtype}")
        low, high = map(int, ids.aminmax()) if ids.numel() else (0, -1)
        if low < 0 or high >= weight.out_features:
            raise IndexError(f"ids must lie in 0..{weight.out_features - 1}; these reach {low}..{high}")
        y = torch.empty(*ids.shape, weight.in_features, dtype=torch.float32)
        self._expand(weight, ids, y, 0)
        return y

    def high_bytes(self, matrix: Tensor) -> Tensor:
        """Histogram of the upper bytes of a contiguous bfloat16 matrix, int64 `[256]`."""
        seen = torch.zeros(256, dtype=torch.int64)
        count = matrix.numel()
        self._count_high_bytes(
            abi.COUNT.pack(matrix=_half_pointer(matrix), seen=seen.data_ptr(), count=count, threads=threads_for(count))
        )
        return seen

    def to_bfloat12(self, matrix: Tensor, packed: Tensor) -> None:
        """Fill in what `ops.weights.bfloat12` lays out, whose table is there, for a bfloat16 matrix `[N, K]`."""
        outputs, inputs = matrix.shape
        arguments = abi.TO_BFLOAT12.pack(
            matrix=_half_pointer(matrix), packed=packed.data_ptr(), outputs=outputs, inputs=inputs,
            threads=threads_for(matrix.numel()),
        )  # fmt: skip
        self._to_bfloat12(arguments)

    def per_head_matmul(self, x: Tensor, matrices: Tensor) -> Tensor:
        """`per_head_matmul` of contiguous matrices."""
        *outer, heads, inputs = x.shape
        outputs = matrices.shape[2]
        if matrices.shape != (heads, inputs, outputs):
            raise ValueError(f"matrices {list(matrices.shape)} do not fit x {list(x.shape)}")
        x = x.flatten(0, -3)
        x = x if x.stride(2) == 1 else x.contiguous()
        y = torch.empty(*outer, heads, outputs, dtype=torch.float32)
        arguments = abi.PER_HEAD_MATMUL.pack(
            x=x.data_ptr(), w=matrices.data_ptr(), y=y.data_ptr(), rows=len(x), heads=heads, inputs=inputs,
            outputs=outputs, kind=KINDS[matrices.dtype], threads=torch.get_num_threads(), x_row=x.stride(0),
            x_head=x.stride(1),
        )  # fmt: skip
        self._per_head_matmul(arguments)
        return y

    def _expand(self, weight: Weight, ids: Tensor | None, y: Tensor, first: int) -> None:
        k = weight.in_features
        arguments = abi.DEQUANTIZE.pack(
            packed=weight.storage.data_ptr(),
            ids=0 if ids is None else ids.data_ptr(),
            out=y.data_ptr(),
            first=first,
            count=y.numel() // k if k else 0,
            outputs=weight.out_features,
            inputs=k,
            stored=WEIGHT_KINDS[weight.kind],
            kind=KINDS[y.dtype],
            threads=threads_for(y.numel()),
        )
        self._dequantize(arguments)


def _half_pointer(matrix: Tensor) -> int:
    if matrix.dtype != torch.bfloat16 or not matrix.is_contiguous() or not matrix.is_cpu:
        raise ValueError(
            f"a matrix to store in 12 bits is contiguous bfloat16; this is {matrix.dtype} {list(matrix.shape)}"
        )
    return matrix.data_ptr()
