"""Gradients that a state cannot give: refused in the backward pass, where somebody asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmstate.errors import UnsupportedError


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, why: str) -> Tensor:
        ctx.why = why
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(
            f"a gradient was asked for through {ctx.why}, where it would be wrong: use a state without kv= to follow "
            "gradients, or torch.no_grad() where none are wanted"
        )


def wanted(*tensors: Tensor) -> bool:
    """Whether a gradient may be asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def refused(x: Tensor, why: str) -> Tensor:
    """`x`, whose backward pass raises `UnsupportedError`; `why`: through what a gradient is lost."""
    return _Refusal.apply(x, torch.zeros((), requires_grad=True), why)
