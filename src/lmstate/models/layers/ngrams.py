"""N-grams of tokens that add to wide residual streams: rows of a large table, found by hashes (Qwen4-Exp)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.source import RowTable
from lmstate.models.layers.hyper_connection import HyperBlock
from lmstate.ops import Norm, Weight
from lmstate.ops.recurrent.causal_conv import causal_conv, last_inputs, tap_major
from lmstate.state import CompositeState, LayerState, Layout, RecurrentState, Step
from lmstate.state.layers.scans import Carry


@dataclass(frozen=True, eq=False)
class NgramTable:
    """A row for each n-gram and head: `[H * D]` of a token and the n - 1 before it.

    An n-gram of each order from 2 up is hashed: its tokens times a multiplier each, joined by exclusive or; the rest by
    a head's size is its row. Tokens in front of the token `end`, or of the text, count as `end`.
    """

    parts: tuple[RowTable, ...]  # [rows, D] each, one after the other, as the file has them; they may be in it
    multipliers: tuple[int, ...]  # of a token, of the one before it, ...
    sizes: Tensor  # int64 [H]: rows of each head, those of bigrams first
    end: int

    @property
    def order(self) -> int:
        """n"""
        return len(self.multipliers)

    @property
    def width(self) -> int:
        """H * D"""
        return len(self.sizes) * self.parts[0].shape[1]

    def __call__(self, tokens: Tensor, before: Tensor) -> Tensor:
        """Tokens int64 `[R, T]`, those before each `[R, T, n - 1]`, nearest first, -1 for none -> float32
        `[R, T, H * D]`."""
        return self._rows(self.hashes(tokens, before).flatten()).view(*tokens.shape, -1).to(tokens.device)

    def hashes(self, tokens: Tensor, before: Tensor) -> Tensor:
        """Rows of n-grams, int64 `[R, T, H]`."""
        offsets, heads = self.sizes.cumsum(0) - self.sizes, len(self.sizes) // (self.order - 1)
        mixed, outside, found = tokens * self.multipliers[0], torch.zeros_like(tokens, dtype=torch.bool), []
        for back, multiplier in enumerate(self.multipliers[1:]):
            outside = outside | (before[..., back] < 0) | (before[..., back] == self.end)
            mixed = mixed ^ (before[..., back].masked_fill(outside, self.end) * multiplier)
            some = slice(back * heads, (back + 1) * heads)
            found.append(mixed[..., None] % self.sizes[some] + offsets[some])
        return torch.cat(found, dim=-1)

    def _rows(self, numbers: Tensor) -> Tensor:
        """Float32 `[M, D]`, each read where it is."""
        numbers = numbers.cpu()
        found = torch.empty(len(numbers), self.parts[0].shape[1], dtype=torch.float32)
        first = 0
        for part in self.parts:
            inside = (numbers >= first) & (numbers < first + len(part))
            if inside.any():
                found[inside] = part[numbers[inside] - first].float()
            first += len(part)
        return found


@dataclass(frozen=True, eq=False)
class NgramInjection:
    """Adds to each of N streams what the table has for a token, by a gate of the stream, and a convolution of that.

    A gate is `sigmoid(root of key . stream)`, both normed, the root with its sign. The taps of the convolution are n
    tokens apart.
    """

    table: NgramTable
    key: Weight  # [N * E, H * D]
    value: Weight  # [E, H * D]
    norm: Norm  # [E], of each stream, without weights
    key_weights: Tensor  # float32 [N, E], of what is normed
    stream_weights: Tensor
    conv_weights: Tensor
    conv: Tensor  # [N * E, C], zeros between the taps

    def __post_init__(self) -> None:
        object.__setattr__(self, "conv", tap_major(self.conv))

    def new_states(self, layout: Layout) -> list[LayerState]:
        """Of the tokens before, and of the convolution."""
        width, kernel = self.conv.shape
        tokens = RecurrentState(layout, self.scan_tokens, [(self.table.order - 1, 1)], 1, names=["tokens"])
        return [tokens, RecurrentState(layout, self.scan, [(kernel - 1, width)], width, names=["conv"])]

    def scan_tokens(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """Numbers `[R, T, 1]` -> those that came before each, `[R, T, n - 1]`, nearest first."""
        back, width = carry[0].shape[1], inputs.shape[1]
        joined = torch.cat([carry[0], inputs], dim=1)
        earlier = [joined[:, back - by : back - by + width] for by in range(1, back + 1)]
        return torch.cat(earlier, dim=-1), (last_inputs(joined, counts, back, full=False),)

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """`[R, T, N * E]` -> its convolution `[R, T, N * E]`."""
        y, tail = causal_conv(inputs, carry[0], self.conv, None, counts, "silu")
        return y, (tail,)

    def __call__(self, x: Tensor, step: Step, caches: Sequence[LayerState]) -> Tensor:
        """Streams `[R, T, N * E]` -> `[R, T, N * E]`."""
        before, convolved = caches
        assert isinstance(before, RecurrentState) and isinstance(convolved, RecurrentState)
        tokens = step.extras["tokens"]
        # Floats count tokens exactly, see the builder; 0 stands for none.
        earlier = before.advance((tokens + 1)[..., None].float(), step).long() - 1
        embedded = self.table(tokens, earlier)
        streams, (count, width) = x.unflatten(-1, self.key_weights.shape), self.key_weights.shape
        keys = ops.norm(ops.linear(embedded, self.key).unflatten(-1, (count, width)), self.norm) * self.key_weights
        products = (keys * (ops.norm(streams, self.norm) * self.stream_weights)).double()
        gate = (products.sum(-1, keepdim=True) / math.sqrt(width)).float()  # in float64 and back, as `ops.sigmoid` is
        gate = ops.sigmoid(gate.abs().clamp(min=1e-6).sqrt() * gate.sign())
        values = gate * ops.linear(embedded, self.value)[..., None, :]  # [R, T, N, E]
        normed = ops.norm(values, self.norm) * self.conv_weights
        return x + values.flatten(-2) + convolved.advance(normed.flatten(-2), step)


@dataclass(frozen=True, eq=False, kw_only=True)
class NgramBlock(HyperBlock):
    """A block in front of which n-grams are added to the streams."""

    ngrams: NgramInjection

    def new_state(self, layout: Layout) -> LayerState:
        return CompositeState([self.mixer.new_state(layout), *self.ngrams.new_states(layout)])

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        assert isinstance(cache, CompositeState)
        own, *others = cache.members
        return super().__call__(self.ngrams(x, step, others), step, own)


def multipliers(vocab: int, order: int, layer: int, seed: int) -> tuple[int, ...]:
    """Odd multipliers of the tokens of an n-gram; a product of one and a token fits 63 bits.

    They come from SplitMix64 (Steele, Lea and Flood 2014), seeded for each layer with n-grams.
    """
    most = max(1, (2**63 - 1) // vocab // 2)
    return tuple(2 * (_splitmix(seed + 10_007 * layer + _GAMMA * (index + 1)) % most) + 1 for index in range(order))


_GAMMA = 0x9E3779B97F4A7C15


def _splitmix(value: int) -> int:
    mask = 2**64 - 1
    value = (value + _GAMMA) & mask
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & mask
    return value ^ value >> 31


def primes(low: int, count: int) -> list[int]:
    """The first primes from `low`, which is at least 3, on."""
    found: list[int] = []
    number = low | 1
    while len(found) < count:
        if all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2)):
            found.append(number)
        number += 2
    return found
