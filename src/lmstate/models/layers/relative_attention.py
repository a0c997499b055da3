"""Attention by content and distance, and convolutions of a few tokens after each part of a block (Inkling)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.mlp import FeedForward
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.recurrent.causal_conv import causal_conv, tap_major
from lmstate.state import (
    CompositeState,
    KeyValueState,
    LayerState,
    Layout,
    RecurrentState,
    Step,
    attention_state,
)
from lmstate.state.layers.scans import Carry


@dataclass(frozen=True, eq=False)
class ShortTaps:
    """A causal convolution of each of F features over C tokens: `taps` float32 `[F, C]`."""

    taps: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tap_major(self.taps))

    def new_state(self, layout: Layout) -> RecurrentState:
        width, kernel = self.taps.shape
        return RecurrentState(layout, self.scan, [(kernel - 1, width)], width, names=["conv"])

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        y, tail = causal_conv(inputs, carry[0], self.taps, None, counts)
        return y, (tail,)


@dataclass(frozen=True)
class LogTemperature:
    """Queries grow by `1 + strength * log(n / floor)` at the n-th token, from `floor` on."""

    floor: int
    strength: float

    def at(self, step: Step) -> Tensor:
        """The factors of a step's queries, float32 `[R, T, 1, 1]`."""
        return step.cached(self, lambda: self._factors(step.positions)[..., None, None])

    def _factors(self, positions: Tensor) -> Tensor:
        return (1.0 + self.strength * ((positions + 1).double() / self.floor).clamp(min=1.0).log()).float()


@dataclass(frozen=True, eq=False)
class RelativeAttention:
    """Attention whose scores get a number of each query by distance: `relative_t @ bank[:, t - j]`.

    `project` gives queries, keys, values, and P numbers `relative` for each query head. `bank [M + 1, P]`: of M
    distances, and zeros for all that are farther. `conv`: of keys and values together, before keys are normalized.
    """

    project: Weight  # [H * D + 2 * K * D + H * P, E]
    out: Weight  # [E, H * D]
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    q_norm: Norm
    k_norm: Norm
    bank: Weight
    conv: ShortTaps
    window: int | None = None
    temperature: LogTemperature | None = None

    def new_states(self, layout: Layout) -> list[LayerState]:
        """The states of keys and values, and of their convolution."""
        stored = attention_state(
            layout, self.kv_heads, self.head_dim, mask=ops.CausalMask(self.window), heads=self.heads, scale=self.scale
        )
        return [stored, self.conv.new_state(layout)]

    def __call__(self, x: Tensor, step: Step, cache: LayerState, tail: LayerState, norm: Norm | None) -> Tensor:
        """x float32 `[R, T, E]` -> `[R, T, E]`."""
        assert isinstance(cache, KeyValueState) and isinstance(tail, RecurrentState)
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, kv, relative = ops.linear(x, self.project, norm=norm).tensor_split([width, width + 2 * kv_width], dim=-1)
        k, v = tail.advance(kv.contiguous(), step).unflatten(-1, (2, self.kv_heads, -1)).unbind(-3)  # [R, T, K, D]
        q, k = ops.norm(q.unflatten(-1, (self.heads, -1)), self.q_norm), ops.norm(k, self.k_norm)
        biases = ops.linear(relative.unflatten(-1, (self.heads, -1)), self.bank)  # [R, T, H, M + 1]
        if self.temperature is not None:
            factors = self.temperature.at(step)
            q, biases = q * factors, biases * factors
        params = ops.AttentionParams(self.scale, biases=biases)
        return ops.linear(cache.attend(q, (k, v), step, params, None).flatten(-2), self.out)


@dataclass(frozen=True, eq=False)
class ConvolvedLayer:
    """Attention and a feed-forward part on the stream, each after a norm and in front of a convolution."""

    attention: RelativeAttention
    conv: ShortTaps
    mlp: FeedForward
    mlp_norm: Norm
    mlp_conv: ShortTaps

    @property
    def kind(self) -> str:
        return "composite"

    def new_state(self, layout: Layout) -> LayerState:
        convs = (self.conv.new_state(layout), self.mlp_conv.new_state(layout))
        return CompositeState([*self.attention.new_states(layout), *convs])

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, CompositeState) and residual is not None
        of_attention, of_keys, behind, behind_mlp = cache.members
        assert isinstance(behind, RecurrentState) and isinstance(behind_mlp, RecurrentState)
        mixed = self.attention(x, step, of_attention, of_keys, norm)
        x = ops.add_residual(residual, behind.advance(mixed, step))
        return x + behind_mlp.advance(self.mlp(x, self.mlp_norm), step)


@dataclass(frozen=True, eq=False)
class SinkRouter:
    """Router to `top_k` of N experts, and always to S more, which share one sum of weights with them.

    The experts with the best sigmoids are chosen, `correction` added for the choice. The weights are the sigmoids of
    all, divided by their sum and multiplied by `scale`.
    """

    weight: Weight  # [N + S, E], which stays float32
    top_k: int
    always: int  # S
    correction: Tensor  # float32 [N]
    scale: float

    @property
    def per_token(self) -> int:
        return self.top_k + self.always

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x float32 `[M, E]` -> (weights float32 `[M, top_k + S]`, expert numbers int64 `[M, top_k + S]`)."""
        scores = ops.linear(x, self.weight).double().sigmoid()  # in float64 and back, as `ops.sigmoid` is
        count = len(self.correction)
        chosen = (scores[:, :count].float() + self.correction).topk(self.top_k, dim=-1).indices
        common = torch.arange(count, count + self.always, device=x.device).expand(len(x), -1)
        chosen = torch.cat([chosen, common], dim=-1)
        weights = scores.gather(-1, chosen)
        return (weights / weights.sum(-1, keepdim=True) * self.scale).float(), chosen
