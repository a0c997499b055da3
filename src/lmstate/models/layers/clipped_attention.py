"""Inkling 2's attention: clipped queries and keys, a score by distance, a sink of each query, and a gated output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.relative_attention import LogTemperature, ShortTaps
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.recurrent.causal_conv import causal_conv
from lmstate.state import KeyValueState, LayerState, Layout, RecurrentState, Step, attention_state
from lmstate.state.layers.scans import Carry


@dataclass(frozen=True, eq=False)
class LengthClip:
    """Shortens vectors that are longer than `most`, after `scale` (float32 `[H, D]`) where there is one."""

    most: float
    ones: Weight  # [1, D], which sums squares in one order
    scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 `[..., D]`, heads in front of D where there is a scale."""
        x = x if self.scale is None else x * self.scale
        lengths = ops.linear(x * x, self.ones).sqrt()
        return x * (self.most / (lengths + 1e-6)).clamp(max=1.0)


@dataclass(frozen=True, eq=False)
class TokenTaps:
    """A causal convolution of H heads over C tokens, whose taps are those of a feature and those of the token and head.

    Inputs are `[features, H * C numbers of the token]`; number n of a head weighs the token n steps before. `scale`
    multiplies all.
    """

    taps: ShortTaps  # of F features over C tokens
    heads: int
    scale: float

    def new_state(self, layout: Layout) -> RecurrentState:
        width, kernel = self.taps.taps.shape
        return RecurrentState(layout, self.scan, [(kernel - 1, width)], width + self.heads * kernel, names=["conv"])

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        width, kernel = self.taps.taps.shape
        x = inputs[..., :width].contiguous()
        of_token = inputs[..., width:].unflatten(-1, (self.heads, kernel))  # [R, T, H, C]
        y, tail = causal_conv(x, carry[0], self.taps.taps, None, counts)
        seen = torch.cat([carry[0].to(x.dtype), x], dim=1).unflatten(-1, (self.heads, -1))  # [R, C - 1 + T, H, F / H]
        for lag in range(kernel):
            first = kernel - 1 - lag
            y = y + (seen[:, first : first + x.shape[1]] * of_token[..., lag, None]).flatten(-2)
        return y * self.scale, (tail,)


@dataclass(frozen=True, eq=False)
class ClippedAttention:
    """Attention of queries, keys and values that each have an input of their own.

    A query's score of a key is their product plus `relative_t @ bank[:, t - j]`; its softmax has one logit more, which
    has no value. `from_q` gives queries, a gate for each of their features, P numbers `relative` and the logit of each
    head; `from_k` and `from_v` give C numbers of each head after the keys and values where `conv` is `TokenTaps`.
    """

    from_q: Weight  # [2 * H * D + H * P + H, E]
    from_k: Weight  # [K * D or K * (D + C), E]
    from_v: Weight
    out: Weight  # [E, H * D]
    heads: int
    kv_heads: int
    head_dim: int
    q_clip: LengthClip
    k_clip: LengthClip
    relative_clip: LengthClip
    v_norm: Norm
    bank: Weight  # [M + 1, P]: of M distances, and zeros for all that are farther
    conv: ShortTaps | TokenTaps
    no_sinks: Tensor  # float32 [H], zeros: scores are moved by a query's own logit instead
    window: int | None = None
    temperature: LogTemperature | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def new_states(self, layout: Layout) -> list[LayerState]:
        """The states of keys and values, and of their convolution."""
        stored = attention_state(
            layout, self.kv_heads, self.head_dim, mask=ops.CausalMask(self.window), heads=self.heads, scale=self.scale
        )
        return [stored, self.conv.new_state(layout)]

    def __call__(
        self, q_in: Tensor, k_in: Tensor, v_in: Tensor, step: Step, cache: LayerState, tail: LayerState
    ) -> Tensor:
        """The inputs of queries, keys and values, float32 `[R, T, E]` each -> `[R, T, E]`."""
        assert isinstance(cache, KeyValueState) and isinstance(tail, RecurrentState)
        width, kv_width, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads
        made = ops.linear(q_in, self.from_q)
        q, gate, relative, sink = made.tensor_split([width, 2 * width, made.shape[-1] - self.heads], dim=-1)
        keys, values = ops.linear(k_in, self.from_k), ops.linear(v_in, self.from_v)
        parts = [keys[..., :kv_width], values[..., :kv_width], keys[..., kv_width:], values[..., kv_width:]]
        k, v = tail.advance(torch.cat(parts, dim=-1), step).unflatten(-1, (2, kv, -1)).unbind(-3)  # [R, T, K, D]
        q, relative = (
            clip(part.unflatten(-1, (self.heads, -1)))
            for clip, part in ((self.q_clip, q), (self.relative_clip, relative))
        )
        biases = ops.linear(relative, self.bank)  # [R, T, H, M + 1]
        if self.temperature is not None:
            factors = self.temperature.at(step)
            q, biases = q * factors, biases * factors
        params = ops.AttentionParams(self.scale, sinks=self.no_sinks, biases=biases - sink[..., None])
        mixed = cache.attend(q, (self.k_clip(k), ops.norm(v, self.v_norm)), step, params, None).flatten(-2)
        return ops.linear(ops.gated(mixed, gate.contiguous()), self.out)


@dataclass(frozen=True, eq=False)
class SoftcappedMLP:
    """`down(cap(gate x) * sigmoid(gate x) * cap'(up x))`, of a gated MLP; `cap(y)` is `c tanh(y / c)`."""

    whole: MLP
    gate_cap: float
    up_cap: float

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        gate, up = ops.linear(x, self.whole.up, norm=norm).chunk(2, dim=-1)
        capped = softcapped(gate, self.gate_cap) * softcapped(up, self.up_cap)
        return ops.linear(capped * ops.sigmoid(gate), self.whole.down, residual=residual)


def softcapped(x: Tensor, cap: float) -> Tensor:
    return ops.in_double(lambda wide: torch.tanh(wide / cap) * cap, x)
