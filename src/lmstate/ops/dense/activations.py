"""Gated linear units (Shazeer 2020): one half of the features, through an activation, gates the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.cpu.abi import GATES

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
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
    library = dispatch.native(x)
    if library is None or act not in GATES or x.dtype != torch.float32:
        return glu_reference(x, act)
    return library.dense.glu(x, act)


def glu_reference(x: Tensor, act: str) -> Tensor:
    function = None if act == "swigluoai" else activation(act)
    gate, up = x.float().chunk(2, dim=-1)
    return swigluoai(gate, up) if function is None else function(gate) * up


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid of any tensor, in its dtype.

    Computed in float64: in float32 torch rounds the last numbers of a vector, which may be another row's, otherwise.
    """
    return x.double().sigmoid().to(x.dtype)
