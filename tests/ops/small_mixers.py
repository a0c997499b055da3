"""Small recurrent mixers of all sorts, from a stream of `embed` features to one of `outputs`."""

from __future__ import annotations

from collections.abc import Callable

import torch

import lmstate.ops as ops
from lmstate.models.layers.gated_delta_net import GatedDelta
from lmstate.models.layers.mamba2 import GatedNorm, Mamba2
from lmstate.models.layers.short_conv import ShortConv
from lmstate.ops import Norm


def delta(kind: str, embed: int, outputs: int, channels: bool = False) -> GatedDelta:
    key_heads, heads, key_dim, value_dim = 2, 4, 16, 40
    features, values, decays = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim, heads * key_dim
    decays = decays if channels else heads
    return GatedDelta(
        ops.quantize(torch.randn(features + values, embed) / 8, kind),
        ops.FloatWeight(torch.randn(heads + decays, embed) / 8),
        ops.quantize(torch.randn(outputs, values) / 8, kind),
        torch.randn(features, 4),
        -torch.linspace(0.1, 3.0, heads),
        torch.randn(decays),
        Norm(torch.rand(value_dim) + 0.5, 1e-6),
        key_heads,
        key_dim,
        value_dim,
        gate_act="sigmoid" if channels else "silu",
        beta_scale=2.0 if channels else 1.0,
    )


def state_space(kind: str, embed: int, outputs: int, norm: GatedNorm | None, biases: bool) -> Mamba2:
    heads, head_dim, groups, states = 4, 24, 2, 20
    inner, features = heads * head_dim, heads * head_dim + 2 * groups * states
    return Mamba2(
        ops.quantize(torch.randn(inner + features + heads, embed) / 8, kind),
        ops.quantize(torch.randn(outputs, inner) / 8, kind),
        torch.randn(features, 4),
        torch.randn(features) if biases else None,
        -torch.linspace(0.1, 3.0, heads),
        torch.randn(heads),
        torch.randn(heads),
        groups,
        states,
        head_dim,
        norm,
        (0.05, 1.5),
        torch.randn(inner + features + heads) if biases else None,
        torch.randn(outputs) if biases else None,
    )


def norm(groups: int = 1, gate_last: bool = False) -> GatedNorm:
    return GatedNorm(Norm(torch.rand(96), 1e-5), groups, gate_last)


def convolution(kind: str, embed: int, outputs: int, kernel: int, biases: bool) -> ShortConv:
    width = 64 + 32 * biases
    return ShortConv(
        ops.quantize(torch.randn(3 * width, embed) / 8, kind),
        ops.quantize(torch.randn(outputs, width) / 8, kind),
        torch.randn(width, kernel),
        torch.randn(width) if biases else None,
        torch.randn(3 * width) if biases else None,
        torch.randn(outputs) if biases else None,
    )


MIXERS: dict[str, Callable[[str, int, int], GatedDelta | Mamba2 | ShortConv]] = {
    "delta": delta,
    "delta with a decay a channel": lambda kind, embed, outputs: delta(kind, embed, outputs, channels=True),
    "state space": lambda kind, embed, outputs: state_space(kind, embed, outputs, norm(), False),
    "state space in groups": lambda kind, embed, outputs: state_space(
        kind, embed, outputs, norm(2, gate_last=True), True
    ),
    "state space without a norm": lambda kind, embed, outputs: state_space(kind, embed, outputs, None, True),
    "convolution": lambda kind, embed, outputs: convolution(kind, embed, outputs, 3, False),
    "convolution of one, with biases": lambda kind, embed, outputs: convolution(kind, embed, outputs, 1, True),
}
