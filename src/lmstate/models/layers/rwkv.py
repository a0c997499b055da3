"""The two mixers of RWKV-4: both see the token before, and one of them an average of all tokens (2305.13048)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.recurrent.causal_conv import causal_conv
from lmstate.ops.recurrent.wkv import wkv
from lmstate.state import LayerState, Layout, RecurrentState, Step
from lmstate.state.layers.scans import Carry


def one_late(x: Tensor, tail: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """x `[R, T, E]` a token late, the first from the tail `[R, 1, E]`; and the new tail."""
    taps = torch.stack([torch.ones_like(x[0, 0]), torch.zeros_like(x[0, 0])], dim=-1)  # [E, 2]
    return causal_conv(x, tail, taps, None, counts)


def mixed(x: Tensor, late: Tensor, share: Tensor) -> Tensor:
    """So much of a token, the rest of the one before."""
    return x * share + late * (1 - share)


@dataclass(frozen=True, eq=False)
class TimeMix:
    """`out(sigmoid(receptance) * wkv(key, value))`, each of the three of its own mixture of two tokens."""

    key: Weight  # [F, E]
    value: Weight
    receptance: Weight
    out: Weight  # [E, F]
    shares: Tensor  # [3, E], of the token itself in key, value and receptance
    decay: Tensor  # [F], negative
    bonus: Tensor  # [F], of the token itself

    @property
    def kind(self) -> str:
        return "recurrent"

    def new_state(self, layout: Layout) -> LayerState:
        width, embed = self.key.shape
        shapes = [(1, embed), (width,), (width,), (width,)]
        return RecurrentState(
            layout,
            self.scan,
            shapes,
            embed,
            names=["late", "numerator", "denominator", "peak"],
            sums=["numerator", "denominator"],
        )

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """The stream, normalized `[R, T, E]` -> gated averages `[R, T, F]`."""
        tail, *average = carry
        late, tail = one_late(inputs, tail, counts)
        weights = self.key, self.value, self.receptance
        k, v, r = (
            ops.linear(mixed(inputs, late, share), weight) for weight, share in zip(weights, self.shares, strict=True)
        )
        num, den, peak = average
        y, new = wkv(k, v, self.decay, self.bonus, (num, den, peak), counts)
        return ops.sigmoid(r) * y, (tail, *new)

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, RecurrentState)
        x = x if norm is None else ops.norm(x, norm)
        return ops.linear(cache.advance(x, step), self.out, residual=residual)


@dataclass(frozen=True, eq=False)
class ChannelMix:
    """`sigmoid(receptance) * value(relu(key)^2)`, key and receptance each of its own mixture of two tokens."""

    key: Weight  # [F, E]
    value: Weight  # [E, F]
    receptance: Weight  # [E, E]
    shares: Tensor  # [2, E], of the token itself in key and receptance

    @property
    def kind(self) -> str:
        return "recurrent"

    def new_state(self, layout: Layout) -> LayerState:
        embed = self.key.in_features
        return RecurrentState(layout, self.scan, [(1, embed)], embed, names=["late"])

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """The stream, normalized `[R, T, E]` -> the same a token late."""
        late, tail = one_late(inputs, carry[0], counts)
        return late, (tail,)

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, RecurrentState)
        x = x if norm is None else ops.norm(x, norm)
        late = cache.advance(x, step)
        of_key, of_receptance = self.shares
        hidden = ops.linear(mixed(x, late, of_key), self.key).relu().square()
        y = ops.sigmoid(ops.linear(mixed(x, late, of_receptance), self.receptance)) * ops.linear(hidden, self.value)
        return y if residual is None else ops.add_residual(residual, y)
