"""Gated linear units (Shazeer 2020): one half of the features, through an activation, gates the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.cpu.abi import GATES
from lmstate.ops.cuda import dense as cuda


def in_double(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of each element, in the dtype of `x`; on a processor computed in float64.

    In float32 torch rounds the last elements of a vector, which may be another row's, otherwise. Where gradients follow
    no bits are promised, and a graph of float64 would take twice the memory and time.
    """
    if x.device.type != "cpu" or (not torch.compiler.is_compiling() and dispatch.is_referring()):
        return function(x)
    return function(x.double()).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: in_double(F.silu, x),
    "gelu": lambda x: in_double(F.gelu, x),
    "gelu_tanh": lambda x: in_double(lambda wide: F.gelu(wide, approximate="tanh"), x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of that name; ValueError names those that there are."""
    if name not in ACTIVATIONS:
        raise ValueError(f"no activation is called {name!r}; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def swigluoai(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of gpt-oss (2508.10925): clamped, from above alone as up is from both sides, with 1 beside up."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * (1.702 * gate).sigmoid()


def glu(x: Tensor, act: str) -> Tensor:
    """act(gate) * up, or `swigluoai(gate, up)`, where `x` `[..., 2K]` is gate | up; float32 `[..., K]`."""
    if act in cuda.GATES and x.dtype == torch.float32 and dispatch.gpu(x):
        return cuda.glu(x, act)
    library = dispatch.native(x)
    if library is None or act not in GATES or x.dtype != torch.float32:
        return glu_reference(x, act)
    return library.dense.glu(x, act)


def glu_reference(x: Tensor, act: str) -> Tensor:
    function = None if act == "swigluoai" else activation(act)
    gate, up = x.float().chunk(2, dim=-1)
    return swigluoai(gate, up) if function is None else function(gate) * up


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid of any tensor, in its dtype; see `in_double`."""
    return in_double(torch.sigmoid, x)
