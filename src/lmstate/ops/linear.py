"""A product with a weight, and what surrounds it in a layer: the norm or the gate before, the residual after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.glu import glu, glu_reference
from lmstate.ops.norm import Norm, norm_reference
from lmstate.ops.norm import norm as apply_norm
from lmstate.ops.panels import linear_panels
from lmstate.ops.weight import Weight

if TYPE_CHECKING:
    from lmstate.ops.cpu import Library

FEW = 32
"""Up to this many rows are multiplied by the native bodies, bit for bit alike however many they are; more, where the
weights are quantised and the processor multiplies bytes fast."""


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias + residual`, float32 `[..., N]`.

    x: float32 `[..., K]`; with `gate` ("silu", "gelu_tanh", "gelu", "relu2", ...) it is `[..., 2K]` = gate | up and
    act(gate) * up is multiplied. `norm` applies to x first; `residual` `[..., N]` is added last.

    Natively, quantised weights multiply activations rounded to int8 in groups of 32, and float weights float32
    activations. What is not `native_rows` goes through torch's matrix product, in float32 where the weight is float32,
    else in bfloat16.
    """
    library = dispatch.native(x, weight.storage, residual)
    if library is not None and native_rows(library, x, weight):
        if norm is not None and (gate is not None or not norm.simple):
            x, norm = apply_norm(x, norm), None
        if gate is not None and gate not in library.GATES:
            x, gate = glu(x, gate), None
        return library.linear(x, weight, bias, norm, library.GATES[gate] if gate else 0, residual)
    if dispatch.exact(x, weight.storage, residual):
        return linear_reference(x, weight, bias, norm=norm, gate=gate, residual=residual)
    return linear_panels(x, weight, bias, norm=norm, gate=gate, residual=residual)


def native_rows(library: Library, x: Tensor, *weights: Weight) -> bool:
    """Whether the native body takes as many rows as x has, for all of these weights."""
    if x.dtype != torch.float32:
        return False
    if x.numel() <= FEW * x.shape[-1]:
        return True
    return library.any_rows and all(weight.kind in ("int4", "int8") for weight in weights)


def linear_reference(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The oracle: float32 arithmetic on the numbers that the weight stands for."""
    if norm is not None:
        x = norm_reference(x, norm)
    if gate is not None:
        x = glu_reference(x, gate)
    y = F.linear(x.float(), weight.dequantize(), bias)
    return y if residual is None else y + residual
