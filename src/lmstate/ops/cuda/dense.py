"""Products, norms and gates, on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmstate.ops.cuda import configs
from lmstate.ops.cuda.attention import elements
from lmstate.ops.cuda.device import keeps_bits, launch, padded
from lmstate.ops.types.params import Norm, Residual
from lmstate.ops.types.weight import FLOAT_KINDS, Weight

STEP = 64
"""Inputs that are summed together; results depend on it, so it is the same for every number of rows."""
WIDEST_NORM = 1 << 16
PACKED = ("int4", "int8")
GATES = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swigluoai")
PART = 1024
ARGMAX_PART = 4096


def can_multiply(weight: Weight) -> bool:
    """Whether the weight is a float matrix or has the packing of int4 or int8."""
    return weight.kind in FLOAT_KINDS or weight.kind in PACKED


def leaves_to_torch(x: Tensor, weight: Weight) -> bool:
    """Whether torch multiplies: many rows with fewer than 32 bits, where bits may depend on the number of rows."""
    return x.numel() >= configs.LARGE * x.shape[-1] and weight.kind != "float32" and not keeps_bits()


def multiplied_dtype(weight: Weight) -> torch.dtype:
    """The dtype of the numbers that a product with this weight multiplies."""
    return torch.bfloat16 if weight.kind in PACKED else FLOAT_KINDS[weight.kind]


def constants(dtype: torch.dtype, shape: configs.KernelShape) -> dict[str, Any]:
    """Constants of the kernels of products, and of their launch."""
    return {
        "ELEMENT": elements()[dtype], "ROWS": shape.rows, "OUTPUTS": shape.outputs, "STEP": STEP,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32", "warps": shape.warps, "stages": shape.stages,
    }  # fmt: skip


def layout(weight: Weight) -> str:
    """The KIND of a weight, for the kernels of products."""
    return weight.kind if weight.kind in PACKED else "float"


def _inputs(x: Tensor, dtype: torch.dtype, shape: configs.KernelShape) -> Tensor:
    """x as a kernel reads it: for tiles of many rows rounded once, else by each program."""
    x = x.contiguous()
    return x.to(dtype) if shape.rows == configs.LARGE else x


def linear(x: Tensor, weight: Weight, bias: Tensor | None, residual: Residual | None) -> Tensor:
    """`x @ weight.T + bias`, added to the residual's stream; float32 `[..., N]`.

    x: float32 `[..., K]`, rounded to the weight's dtype, to bfloat16 where it is packed. Sums are float32.
    """
    from lmstate.ops.cuda.kernels import dense as kernels

    rows = x.numel() // x.shape[-1] if x.numel() else 0
    out = torch.empty(*x.shape[:-1], weight.out_features, dtype=torch.float32, device=x.device)
    if not rows:
        return out
    dtype, outputs = multiplied_dtype(weight), weight.out_features
    shape = configs.product(rows, outputs, dtype.itemsize)
    launch(
        kernels.product, (-(-outputs // shape.outputs), -(-rows // shape.rows)),
        _inputs(x, dtype, shape), weight.storage, out if bias is None else bias,
        out if residual is None else residual.stream.contiguous(), out, rows, outputs, weight.in_features,
        weight.in_features // 32, 1.0 if residual is None else residual.scale, KIND=layout(weight),
        HAS_BIAS=bias is not None, HAS_STREAM=residual is not None, **constants(dtype, shape),
    )  # fmt: skip
    return out


def linear_glu(x: Tensor, weight: Weight, bias: Tensor | None, act: str) -> Tensor:
    """`glu` of `linear` without a residual, bit for bit; float32 `[..., N / 2]`."""
    from lmstate.ops.cuda.kernels import dense as kernels

    rows, outputs = x.numel() // x.shape[-1] if x.numel() else 0, weight.out_features // 2
    out = torch.empty(*x.shape[:-1], outputs, dtype=torch.float32, device=x.device)
    if not rows:
        return out
    dtype = multiplied_dtype(weight)
    shape = configs.product(rows, outputs, dtype.itemsize, sums=2)
    launch(
        kernels.product_glu, (-(-outputs // shape.outputs), -(-rows // shape.rows)), _inputs(x, dtype, shape),
        weight.storage, out if bias is None else bias, out, rows, outputs, weight.in_features, weight.in_features // 32,
        ACT=act, KIND=layout(weight), HAS_BIAS=bias is not None, **constants(dtype, shape),
    )  # fmt: skip
    return out


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.argmax` of float32 `[R, V]`: the first of equal numbers, where torch's may be any of them."""
    from lmstate.ops.cuda.kernels import dense as kernels

    rows, width = x.shape
    parts = -(-width // ARGMAX_PART)
    largest, top = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in ((rows, parts), (rows,)))
    places, place = (torch.empty(shape, dtype=torch.int64, device=x.device) for shape in ((rows, parts), (rows,)))
    if rows:
        launch(kernels.argmax_parts, (rows, parts), x.contiguous(), largest, places, width, parts, WIDTH=ARGMAX_PART)
        launch(kernels.argmax_merged, (rows,), largest, places, top, place, parts, PARTS=padded(parts))
    return top, place


def norm(x: Tensor, norm: Norm) -> Tensor:
    """`ops.norm` of float32 `[..., E]`, E at most `WIDEST_NORM` -> float32 `[..., E]`."""
    from lmstate.ops.cuda.kernels import dense as kernels

    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        width, weight = x.shape[-1], norm.weight.contiguous()
        launch(
            kernels.norm, (x.numel() // width,), x.contiguous(), weight,
            weight if norm.bias is None else norm.bias.contiguous(), out, width, weight.numel() // width, norm.eps,
            LAYER=norm.kind == "layer", HAS_BIAS=norm.bias is not None, WIDTH=padded(width),
        )  # fmt: skip
    return out


def per_head_matmul(x: Tensor, matrices: Tensor) -> Tensor:
    """`ops.dense.per_head.per_head_matmul` of float32 `[R, T, H, A]` and contiguous matrices of a dtype in
    `elements()`."""
    from lmstate.ops.cuda.kernels import dense as kernels

    heads, inputs, outputs = matrices.shape
    rows = x.shape[0] * x.shape[1]
    out = torch.empty(*x.shape[:-1], outputs, dtype=torch.float32, device=x.device)
    if out.numel():
        tile = configs.row_tile(rows)
        shape = configs.product_of_tiles(tile, heads * -(-rows // tile), outputs, matrices.dtype.itemsize)
        launch(
            kernels.per_head_product, (-(-outputs // shape.outputs), -(-rows // tile), heads), x.contiguous(), matrices,
            out, rows, heads, inputs, outputs, **constants(matrices.dtype, shape),
        )  # fmt: skip
    return out


def glu(x: Tensor, act: str) -> Tensor:
    """act(gate) * up of `x` `[..., 2K]` = gate | up; float32 `[..., K]`."""
    from lmstate.ops.cuda.kernels import dense as kernels

    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=torch.float32, device=x.device)
    if out.numel():
        grid = (out.numel() // width, -(-width // PART))
        launch(kernels.glu, grid, x.contiguous(), out, width, ACT=act, WIDTH=min(padded(width), PART))
    return out
