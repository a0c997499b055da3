"""Products where no native body runs: of traced graphs, other devices, or a build without a compiler."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.dense.activations import glu
from lmstate.ops.dense.norm import add_residual
from lmstate.ops.dense.norm import norm as apply_norm
from lmstate.ops.processor import gives_float32, multiplies_bfloat16
from lmstate.ops.types.params import Norm, Residual
from lmstate.ops.types.weight import Weight


def gemm(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: str | None = None,
    residual: Residual | None = None,
) -> Tensor:
    """`ops.linear` by torch's product, in bfloat16 unless the weight is more than that or it would be slower."""
    compiling = torch.compiler.is_compiling()
    fast = compiling or multiplies_bfloat16(x.device)
    dtype = torch.bfloat16 if fast and weight.kind != "float32" else torch.float32
    x = x if norm is None else apply_norm(x, norm)
    x, w = (x if gate is None else glu(x, gate)).to(dtype), weight.dequantize(dtype)
    tracked = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    plain = not (compiling or tracked or dispatch.is_intercepted())
    if plain and dtype == torch.bfloat16 and gives_float32(x.device):
        y = torch.mm(x.flatten(0, -2), w.T, out_dtype=torch.float32).view(*x.shape[:-1], len(w))  # no rounding, no copy
    else:
        y = F.linear(x, w).float()
    y = y if bias is None else y + bias
    return y if residual is None else add_residual(residual, y)
