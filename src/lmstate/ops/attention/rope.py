"""Rotary position embedding (Su et al. 2021): pairs of features of a head turn by an angle of the position."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cuda import attention as cuda


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first `rot` features of every head; float32 `[R, T, H, D]`.

    x: `[R, T, H, D]`. cos, sin: float32 `[R, T, rot / 2]` with rot <= D; the features beyond `rot` pass unchanged.
    A pair is features (i, i + rot / 2), or (2i, 2i + 1) where `interleaved`.
    """
    if x.dtype == torch.float32 and dispatch.gpu(x):
        return cuda.rope(x, cos, sin, interleaved)
    library = dispatch.native(x)
    if library is None or x.dtype != torch.float32:
        return rope_reference(x, cos, sin, interleaved)
    return library.attention.rope(x, cos, sin, interleaved)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    x = x.float()
    rot = 2 * cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]  # [R, T, 1, rot / 2]: the same for every head
    head, rest = x[..., :rot], x[..., rot:]
    if interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = head.chunk(2, dim=-1)
        tracked = (torch.is_grad_enabled() and x.requires_grad) or torch.compiler.is_compiling()
        if not (x.is_cpu or rest.shape[-1] or tracked or dispatch.is_intercepted()):
            return _rotated(a, b, cos, sin)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def _rotated(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same where each operation is a launch: four of them."""
    out = a.new_empty(*a.shape[:-1], 2 * a.shape[-1])
    first, second = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return out
