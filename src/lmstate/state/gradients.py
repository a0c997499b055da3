"""Gradients through a state: those that it cannot give are refused in the backward pass; copies pass them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lmstate.errors import UnsupportedError


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, why: str) -> Tensor:
        ctx.why = why
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(
            f"a gradient was asked for through {ctx.why}, where it would be wrong: use a state without kv= and "
            "carries= to follow gradients, or torch.no_grad() where none are wanted"
        )


def wanted(*tensors: Tensor) -> bool:
    """Whether a gradient may be asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def refused(x: Tensor, why: str) -> Tensor:
    """`x`, whose backward pass raises `UnsupportedError`; `why`: through what a gradient is lost."""
    return _Refusal.apply(x, torch.zeros((), requires_grad=True), why)


class CopiedGraphs(TorchFunctionMode):
    """Have `copy.deepcopy` copy results of operations too, of which torch refuses it: a gradient follows the copy."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is not Tensor.__deepcopy__ or args[0].is_leaf:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        with torch.enable_grad():
            copied = memo[id(tensor)] = tensor.clone()
        return copied
