"""A layer of RWKV-7 (2503.14456): a matrix that learns by a delta rule, and a feed-forward part of two tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.rwkv import mixed, one_late
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.recurrent.vector_delta_rule import vector_delta_rule
from lmstate.state import CompositeState, LayerState, Layout, RecurrentState, Step
from lmstate.state.layers.scans import Carry

Act: TypeAlias = Literal["tanh", "sigmoid"]

SLOWEST = -math.exp(-0.5)
"""The log decay of a channel that forgets as fast as any can."""


@dataclass(frozen=True, eq=False)
class LowRankMap:
    """`up act(down x) + bias`."""

    down: Weight  # [B, E]
    up: Weight  # [N, B]
    bias: Tensor | None = None  # [N]
    act: Act | None = None

    def __call__(self, x: Tensor) -> Tensor:
        low = ops.linear(x, self.down)
        if self.act is not None:
            low = ops.sigmoid(low) if self.act == "sigmoid" else ops.in_double(torch.tanh, low)
        return ops.linear(low, self.up, self.bias)


@dataclass(frozen=True, eq=False)
class TokenShift:
    """Remembers the last token of a normalized stream, and gives each token the one before it."""

    width: int

    def new_state(self, layout: Layout) -> RecurrentState:
        return RecurrentState(layout, self.scan, [(1, self.width)], self.width, names=["late"])

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """The stream `[R, T, E]` -> the same a token late."""
        late, tail = one_late(inputs, carry[0], counts)
        return late, (tail,)


@dataclass(frozen=True, eq=False)
class VectorDelta:
    """The mixer of H heads of D features; each of its six inputs is a mixture of its own of a token and the one before.

    The scan reads r, k, v and what the decay and the learning rate come from, and normalizes the answers of each head.
    """

    shares: Tensor  # [6, E], of the token before in r, decay, k, v, learning rate and gate
    receptance: Weight  # [E, E]
    key: Weight
    value: Weight
    decay: LowRankMap
    rate: LowRankMap
    gate: LowRankMap
    blend: LowRankMap | None  # how much of the first layer's values comes in; None in the first layer
    removal: Tensor  # [E], times k: the keys whose answers are removed
    replacement: Tensor  # [E]: how far the learning rate scales the keys that are written
    bonus: Tensor  # [H, D], of the token itself
    unit: Norm  # makes vectors of D features unit vectors
    norm: Norm  # of each head, [H, D]
    out: Weight  # [E, E]

    @property
    def heads(self) -> int:
        """H"""
        return self.bonus.shape[0]

    def new_state(self, layout: Layout) -> RecurrentState:
        heads, dim = self.bonus.shape
        shape, inputs = (heads, dim, dim), 5 * heads * dim
        return RecurrentState(layout, self.scan, [shape], inputs, names=["recurrent"], sums=["recurrent"])

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """r, k, v | decay and learning rate before their sigmoids `[R, T, 5 * E]` -> normalized answers `[R, T, E]`."""
        r, k, v, decay, rate = inputs.chunk(5, dim=-1)
        a = ops.sigmoid(rate)
        kk, written = k * self.removal, k * (1.0 + (a - 1.0) * self.replacement)
        g = SLOWEST * torch.sigmoid(decay.double())  # float64, for its exp
        r, g, written, v, kk, a = (x.unflatten(-1, (self.heads, -1)) for x in (r, g, written, v, kk, a))
        y, state = vector_delta_rule(r, g, written, v, ops.norm(kk.contiguous(), self.unit), a, carry[0], counts)
        own = (r * written * self.bonus).sum(-1, keepdim=True) * v
        return (ops.norm(y, self.norm) + own).flatten(-2), (state,)

    def __call__(
        self, x: Tensor, late: Tensor, first: Tensor, step: Step, cache: RecurrentState
    ) -> tuple[Tensor, Tensor]:
        """x normalized, the same a token late `[R, T, E]`, and the first layer's values (or of no width there).

        Returns what is added to the stream, and the first layer's values.
        """
        xr, xw, xk, xv, xa, xg = (mixed(late, x, share) for share in self.shares)
        r, k, v = ops.linear(xr, self.receptance), ops.linear(xk, self.key), ops.linear(xv, self.value)
        if self.blend is None:
            first = v
        else:
            v = v + (first - v) * ops.sigmoid(self.blend(xv))
        y = cache.advance(torch.cat([r, k, v, self.decay(xw), self.rate(xa)], dim=-1), step)
        return ops.linear(y * self.gate(xg), self.out), first


@dataclass(frozen=True, eq=False)
class SquaredMix:
    """`value(relu(key(x))^2)`, x a mixture of two tokens."""

    key: Weight  # [F, E]
    value: Weight  # [E, F]
    share: Tensor  # [E], of the token before

    def __call__(self, x: Tensor, late: Tensor) -> Tensor:
        return ops.linear(ops.linear(mixed(late, x, self.share), self.key).relu().square(), self.value)


@dataclass(frozen=True, eq=False)
class VectorDeltaLayer:
    """Both parts of a layer, each after a norm. The stream holds the first layer's values behind it."""

    mixer: VectorDelta
    mixer_norm: Norm
    feed: SquaredMix
    feed_norm: Norm

    @property
    def kind(self) -> str:
        return "composite"

    @property
    def shift(self) -> TokenShift:
        return TokenShift(self.mixer.key.in_features)

    def new_state(self, layout: Layout) -> LayerState:
        parts = [self.shift.new_state(layout), self.mixer.new_state(layout), self.shift.new_state(layout)]
        return CompositeState(parts)

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        """x float32 `[R, T, E]`, or `[R, T, 2 * E]` after the first layer -> `[R, T, 2 * E]`."""
        assert isinstance(cache, CompositeState)
        of_mixer, state, of_feed = cache.members
        assert isinstance(of_mixer, RecurrentState)
        assert isinstance(state, RecurrentState) and isinstance(of_feed, RecurrentState)
        x, first = x.tensor_split([self.mixer.key.in_features], dim=-1)
        normed = ops.norm(x, self.mixer_norm)
        added, first = self.mixer(normed, of_mixer.advance(normed, step), first, step, state)
        x = x + added
        normed = ops.norm(x, self.feed_norm)
        x = x + self.feed(normed, of_feed.advance(normed, step))
        return torch.cat([x, first], dim=-1)


@dataclass(frozen=True, eq=False)
class StreamAlone:
    """Takes the first layer's values away from the stream."""

    width: int

    def __call__(self, x: Tensor) -> Tensor:
        return x[..., : self.width].contiguous()
