"""Products of a few rows by our native bodies, in the `nn.Linear` modules that a model already has.

Nothing is copied or kept: the module stays where it is, with its parameters, hooks and names, and takes another class.
It multiplies with the memory of its parameter at the time of the call, so an edited, replaced or converted
weight is the one that counts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmstate.ops import dispatch
from lmstate.ops.cpu import Library
from lmstate.ops.weights.grouped import FloatWeight

# Rows up to which the native body is the faster one. It computes in float32; processors multiply bfloat16 themselves.
MAX_ROWS = {torch.float32: 32, torch.float16: 32, torch.bfloat16: 12}


class NativeLinear(nn.Linear):
    """`nn.Linear`, natively where that is the same and faster: few rows, on the processor, in one float type, with no
    gradient to follow and nothing that traces or transforms the call. Sums are float32, rounded to the type once."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., K] -> [..., N]`."""
        held = self._parameters  # where attributes are looked up last; parametrized or pruned, a weight is elsewhere
        weight, bias = held.get("weight"), held.get("bias")
        library = dispatch.native(input, weight, bias)  # None in a graph too
        if library is None or weight is None or not _applies(input, weight, bias):
            return super().forward(input)
        return product(library, input, weight, bias)


def use_native_linear(model: nn.Module) -> int:
    """Make the `nn.Linear`s of a model multiply few rows natively; returns how many do.

    Only modules of exactly that class are taken. Call it again after adding modules; `use_torch_linear` takes it back.
    """
    _swap(model, nn.Linear, NativeLinear)
    return sum(type(module) is NativeLinear for module in model.modules())


def use_torch_linear(model: nn.Module) -> None:
    """Take back what `use_native_linear` did."""
    _swap(model, NativeLinear, nn.Linear)


def _swap(model: nn.Module, before: type[nn.Module], after: type[nn.Module]) -> None:
    for module in model.modules():
        if type(module) is before:
            module.__class__ = after


def product(library: Library, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x `[..., K]` by a contiguous weight `[N, K]` of its type, by a native body: `[..., N]` of that type."""
    b = None if bias is None else bias.float()
    return library.dense.linear(x.float(), FloatWeight(weight), b, None, 0, None).to(x.dtype)


def _applies(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are plain tensors that fit, few enough, and are to be multiplied here and now."""
    inputs, dtype = weight.shape[1], x.dtype
    return (
        0 < x.numel() <= MAX_ROWS.get(dtype, 0) * inputs
        and x.shape[-1] == inputs
        and weight.dtype == dtype
        and type(x) is Tensor
        and type(weight) is nn.Parameter
        and (bias is None or (type(bias) is nn.Parameter and bias.dtype == dtype))
        and weight.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
        and not dispatch.is_intercepted()
    )
