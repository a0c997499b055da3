"""A product with a weight, and what surrounds it in a layer: the norm or the gate before, the residual after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.cpu.abi import GATES
from lmstate.ops.cuda import dense as cuda
from lmstate.ops.dense.activations import glu, glu_reference
from lmstate.ops.dense.gemm import gemm
from lmstate.ops.dense.norm import add_residual, norm_reference
from lmstate.ops.dense.norm import norm as apply_norm
from lmstate.ops.types.params import Norm, Residual
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.grouped import GROUP
from lmstate.ops.weights.lora import LoraWeight
from lmstate.ops.weights.split import PartWeight, SplitWeight, SummedWeight


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: str | None = None,
    residual: Residual | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, added to `residual`, float32 `[..., N]`; in `out` if that is given, without gradients.

    x: float32 `[..., K]`; with `gate` ("silu", "gelu_tanh", "gelu", "relu2", ...) it is `[..., 2K]` = gate | up and
    act(gate) * up is multiplied. `norm` applies to x first; `residual`: the stream that the product is added to, last.

    Rounding and the order of sums are the same for one row and for thousands. Quantized weights
    multiply activations rounded to int8 in groups of 32 (`weight.activations` of 8), or twice, the second time what the
    first left (16); float weights multiply float32 activations. Where the processor is faster with pairs of bfloat16
    than with twice as many floats, bfloat16 weights of K a multiple of 32 multiply activations rounded to bfloat16.
    """
    stream = None if residual is None else residual.stream
    if out is not None:
        library = dispatch.native(x, weight.storage, stream)
        simple = not isinstance(weight, LoraWeight | PartWeight) and gate is None and residual is None
        if library is None or x.dtype != torch.float32 or not simple:
            return out.copy_(linear(x, weight, bias, norm=norm, gate=gate, residual=residual))
        if norm is not None and not norm.simple:
            x, norm = apply_norm(x, norm), None
        return library.dense.linear(x, weight, bias, norm, 0, None, out)
    if isinstance(weight, LoraWeight):
        y = weight.product(linear, _entered(x, norm, gate), bias)
        return y if residual is None else add_residual(residual, y)
    if isinstance(weight, SummedWeight):
        assert norm is None, "a norm reads the inputs of all ranks"
        y = weight.product(linear, x, bias, gate)
        return y if residual is None else add_residual(residual, y)
    if isinstance(weight, SplitWeight):
        if residual is not None and residual.norm is not None:
            return add_residual(residual, linear(x, weight, bias, norm=norm, gate=gate))
        return weight.product(linear, _entered, x, bias, norm, gate, residual)
    library = dispatch.native(x, weight.storage, stream)
    if library is not None and x.dtype == torch.float32:
        if residual is not None and not residual.simple:
            return add_residual(residual, linear(x, weight, bias, norm=norm, gate=gate))
        if norm is not None and (gate is not None or not norm.simple):
            x, norm = apply_norm(x, norm), None
        if gate is not None and gate not in GATES:
            x, gate = glu(x, gate), None
        return library.dense.linear(x, weight, bias, norm, GATES[gate] if gate else 0, residual)
    on_gpu = x.dtype == torch.float32 and cuda.can_multiply(weight) and dispatch.gpu(x, weight.storage, bias, stream)
    if on_gpu and not cuda.leaves_to_torch(x, weight):
        x = _entered(x, norm, gate)
        if residual is not None and residual.norm is not None:
            return add_residual(residual, cuda.linear(x, weight, bias, None))
        return cuda.linear(x, weight, bias, residual)
    if dispatch.exact(x, weight.storage, stream):
        return linear_reference(x, weight, bias, norm=norm, gate=gate, residual=residual)
    return gemm(x, weight, bias, norm=norm, gate=gate, residual=residual)


def linear_split_concat(x: Tensor, weight: Weight, width: int, beside: Tensor) -> tuple[Tensor, Tensor]:
    """`linear`, cut after `width` outputs: the first part with `beside` `[..., G]` after it, and the rest."""
    y = linear(x, weight)
    return torch.cat([y[..., :width], beside], dim=-1), y[..., width:]


def linear_reference(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: str | None = None,
    residual: Residual | None = None,
) -> Tensor:
    """The oracle: float32 arithmetic on the numbers that the weight stands for, and on rounded activations of 8 bits.

    Those of 16 bits are as exact as floats here. Gradients go through the rounding as if there were none.
    """
    if norm is not None:
        x = norm_reference(x, norm)
    if gate is not None:
        x = glu_reference(x, gate)
    if weight.activations == 8:
        x = x + (rounded_to_bytes(x.detach()) - x.detach())
    if x.requires_grad and weight.kind != "float32" and not weight.storage.requires_grad and torch.is_grad_enabled():
        y = _Frozen.apply(x.float(), weight)
        y = y if bias is None else y + bias
    else:
        y = F.linear(x.float(), weight.dequantize(), bias)
    return y if residual is None else add_residual(residual, y)


def rounded_to_bytes(x: Tensor) -> Tensor:
    """Return float32 `[..., K]` as a weight with `activations` of 8 multiplies it: `scale * q`, q in -127..127.

    Each group of 32 has the scale of its largest magnitude; K is a multiple of 32.
    """
    groups = x.unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return ((groups * inverse).round() * (largest / 127)).flatten(-2)


class _Frozen(torch.autograd.Function):
    """A product with a weight that does not train. Backward expands it again: floats of every weight never coexist."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantize())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.weight.dequantize(), None


def _entered(x: Tensor, norm: Norm | None, gate: str | None) -> Tensor:
    """Inputs of a product after its norm and its gate."""
    x = x if norm is None else apply_norm(x, norm)
    return x if gate is None else glu(x, gate)
