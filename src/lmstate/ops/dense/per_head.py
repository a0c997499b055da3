"""Products of each head with a matrix of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cuda import dense as cuda
from lmstate.ops.types.weight import FLOAT_KINDS


def per_head_matmul(x: Tensor, matrices: Tensor) -> Tensor:
    """A matrix for each head: x float32 `[R, T, H, A]`, matrices `[H, A, B]` -> float32 `[R, T, H, B]`.

    Where no native body runs, x is rounded to the matrices' dtype. All is float64 where these are.
    """
    rows, width, heads, _ = x.shape
    readable = x.dtype == torch.float32 and matrices.is_contiguous()
    if readable and matrices.dtype in FLOAT_KINDS.values() and dispatch.gpu(x, matrices):
        return cuda.per_head_matmul(x, matrices)
    library = dispatch.native(x, matrices)
    if library is not None and readable:
        return library.dense.per_head_matmul(x, matrices)
    product = x.to(matrices.dtype).flatten(0, 1).transpose(0, 1) @ matrices  # [H, R * T, B]
    product = product.transpose(0, 1).reshape(rows, width, heads, -1)
    return product.to(torch.promote_types(product.dtype, torch.float32))
