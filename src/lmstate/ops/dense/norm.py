"""Normalization over the last axis: root mean square (Zhang & Sennrich 2019) or layer norm (Ba et al. 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cuda import dense as cuda
from lmstate.ops.types.params import Norm, Residual


def norm(x: Tensor, norm: Norm) -> Tensor:
    """Normalize `x` `[..., E]` over its last axis; float32 `[..., E]`."""
    if norm.kind == "none":
        return x.float() * norm.weight
    if x.dtype == torch.float32 and x.shape[-1] <= cuda.WIDEST_NORM and dispatch.gpu(x, norm.weight, norm.bias):
        return cuda.norm(x, norm)
    library = dispatch.native(x, norm.weight)
    if library is None or not norm.simple or x.dtype != torch.float32:
        return norm_reference(x, norm)
    return library.dense.rms_norm(x, norm.weight, norm.eps)


def norm_reference(x: Tensor, norm: Norm) -> Tensor:
    x = x.float()
    if norm.kind == "layer":
        y = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=norm.eps) * norm.weight
    elif not x.is_cpu and norm.weight.ndim == 1:
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)  # one kernel
    else:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    return y if norm.bias is None else y + norm.bias


def add_residual(residual: Residual, output: Tensor) -> Tensor:
    """`stream + scale * norm(output)`, output float32 `[..., N]`."""
    if residual.norm is not None:
        output = norm(output, residual.norm)
    return residual.stream + (output if residual.scale == 1.0 else output * residual.scale)
