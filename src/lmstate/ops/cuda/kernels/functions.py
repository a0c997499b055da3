"""Functions of one number, as several kernels compute them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pointer(address, TYPE: tl.constexpr):
    """The pointer to numbers of TYPE at an address that is a multiple of 16.

    The hint comes after the cast: Triton 3.7 forgets one that comes before it, and loads number by number.
    """
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x), exact where e^x is small (Kahan's log1p); x itself from 20 on, as in torch."""
    raised = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + raised
    logged = tl.where(above == 1.0, raised, tl.log(above) * (raised / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(x > 20.0, x, logged)


@triton.jit
def one_minus_exp(x):
    """1 - e^x for x <= 0, exact where x is near 0."""
    near = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8)))))))
    return tl.where(x > -0.4, -near, 1.0 - tl.exp(x))


@triton.jit
def activated(gate, ACT: tl.constexpr):
    """The activation of this name: silu, sigmoid, gelu_tanh, gelu, relu2 or relu."""
    if ACT == "silu":
        return gate / (1.0 + tl.exp(-gate))
    elif ACT == "sigmoid":
        return sigmoid(gate)
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        raised = tl.exp(-2.0 * tl.abs(inner))
        tanh = (1.0 - raised) / (1.0 + raised)
        return 0.5 * gate * (1.0 + tl.where(inner < 0, -tanh, tanh))
    elif ACT == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACT == "relu2":
        positive = tl.maximum(gate, 0.0)
        return positive * positive
    else:
        return tl.maximum(gate, 0.0)


@triton.jit
def gated(gate, up, ACT: tl.constexpr):
    """act(gate) * up, or the gate of gpt-oss."""
    if ACT == "swigluoai":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return (up + 1.0) * gate * sigmoid(1.702 * gate)
    else:
        return activated(gate, ACT) * up
