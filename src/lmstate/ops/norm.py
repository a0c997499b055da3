"""Normalisation over the last axis: root mean square (Zhang & Sennrich 2019) or layer norm (Ba et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lmstate.ops import dispatch


@dataclass(frozen=True, eq=False)
class Norm:
    """What a norm multiplies and adds. `weight` and `bias` are float32 `[E]`; `[H, E]` where every head has its own."""

    weight: Tensor
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: Tensor | None = None

    @property
    def simple(self) -> bool:
        """Whether the native bodies know it."""
        return self.kind == "rms" and self.bias is None and self.weight.ndim == 1


def norm(x: Tensor, norm: Norm) -> Tensor:
    """Normalise `x` `[..., E]` over its last axis; float32 `[..., E]`."""
    library = dispatch.native(x, norm.weight)
    if library is None or not norm.simple or x.dtype != torch.float32:
        return norm_reference(x, norm)
    return library.rms_norm(x, norm.weight, norm.eps)


def norm_reference(x: Tensor, norm: Norm) -> Tensor:
    x = x.float()
    if norm.kind == "layer":
        y = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=norm.eps) * norm.weight
    else:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    return y if norm.bias is None else y + norm.bias
