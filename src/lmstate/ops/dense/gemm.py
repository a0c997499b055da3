"""Products of many rows: in float32 by torch, in bfloat16 by the native body, which expands a weight as it multiplies.

Where the processor multiplies whole matrices of bfloat16, or none, torch's product takes panels of the expanded weight.
Everything between the products is rounded to the product's dtype as it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.cpu.abi import GATES
from lmstate.ops.dense.activations import glu
from lmstate.ops.dense.norm import add_residual
from lmstate.ops.dense.norm import norm as apply_norm
from lmstate.ops.memory import scratch
from lmstate.ops.processor import multiplies_bfloat16
from lmstate.ops.types.params import Norm, Residual
from lmstate.ops.types.weight import Weight

if TYPE_CHECKING:
    from lmstate.ops.cpu import Library

PANEL = 4 << 20
"""Numbers of a quantised weight that are made floats at a time."""


def gemm(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: str | None = None,
    residual: Residual | None = None,
) -> Tensor:
    """`ops.linear` of many rows, in the dtype of `product_dtype`. x may come in bfloat16."""
    library = dispatch.native(x, weight.storage, None if residual is None else residual.stream)
    dtype = product_dtype(weight, library)
    x = as_product_dtype(x, dtype, norm, gate)
    if library is None or weight.kind == "float32":
        y = F.linear(x, weight.dequantize(dtype)).float()
        y = y if bias is None else y + bias
        return y if residual is None else add_residual(residual, y)
    flat = x.reshape(-1, weight.in_features)
    y = torch.empty(len(flat), weight.out_features, dtype=torch.float32)
    direct = residual is not None and residual.norm is None and residual.scale == 1.0
    stream = residual.stream.reshape(y.shape).contiguous() if residual is not None and direct else None
    gemm_into(library, flat, weight, y, bias=bias, residual=stream)
    y = y.view(*x.shape[:-1], -1)
    return y if residual is None or direct else add_residual(residual, y)


def gemm_split_concat(library: Library, x: Tensor, weight: Weight, width: int, beside: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.linear_split_concat` of many rows and a weight that is not float32."""
    flat = as_product_dtype(x, product_dtype(weight, library)).reshape(-1, weight.in_features)
    first = torch.empty(len(flat), width + beside.shape[-1], dtype=torch.float32)
    rest = torch.empty(len(flat), weight.out_features - width, dtype=torch.float32)
    first[:, width:] = beside.reshape(len(flat), -1)
    gemm_into(library, flat, weight, first[:, :width])
    gemm_into(library, flat, weight, rest, first=width)
    return first.view(*x.shape[:-1], -1), rest.view(*x.shape[:-1], -1)


def gemm_into(
    library: Library,
    x: Tensor,
    weight: Weight,
    y: Tensor,
    *,
    first: int = 0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """Write `residual + x @ weight.T + bias` into y, float32 `[M, n]`: the n outputs from `first` on.

    x: `[M, K]` in `product_dtype`. bias: `[N]`. y and the residual may be some columns of wider tensors.
    """
    if library.dense.can_gemm(weight):
        library.dense.gemm(x, weight, y, first=first, bias=bias, residual=residual)
        return
    for at, panel in panels(library, weight, x.dtype, first, y.shape[1]):
        y[:, at : at + len(panel)] = F.linear(x, panel)
    if bias is not None:
        y += bias[first : first + y.shape[1]]
    if residual is not None:
        y += residual


def product_dtype(weight: Weight, library: Library | None) -> torch.dtype:
    """What the products of many rows multiply: bfloat16, unless the weight is more than that or it would be slower."""
    if weight.kind == "float32":
        return torch.float32
    native = library is not None and library.dense.can_gemm(weight)
    fast = native or torch.compiler.is_compiling() or multiplies_bfloat16(weight.device)
    return torch.bfloat16 if fast else torch.float32


def as_product_dtype(x: Tensor, dtype: torch.dtype, norm: Norm | None = None, gate: str | None = None) -> Tensor:
    """x after its norm and its gate, in the dtype of a product."""
    library = dispatch.native(x)
    if library is not None:
        if norm is not None and gate is None and norm.simple and x.dtype == torch.float32:
            return library.dense.rms_norm(x, norm.weight, norm.eps, dtype)
        if norm is None and gate in GATES:
            return library.dense.glu(x, gate, dtype)
    x = x if norm is None else apply_norm(x, norm)
    return (x if gate is None else glu(x, gate)).to(dtype)


def panels(
    library: Library, weight: Weight, dtype: torch.dtype, first: int, count: int
) -> Iterator[tuple[int, Tensor]]:
    """(0.., `[n, K]`) for `count` outputs from `first` on; the next panel overwrites one that was made."""
    k = weight.in_features
    if weight.storage.dtype == dtype:
        yield 0, weight.storage[first : first + count]
        return
    step = max(PANEL // k, 1)
    for at in range(0, count, step):
        n = min(step, count - at)
        panel = scratch(k * n, dtype).view(n, k)
        library.dense.dequantize(weight, first + at, panel)
        yield at, panel
