"""Residual streams of blocks of layers: a layer reads a mixture of what earlier blocks gave, chosen by learned queries.

The stream holds N parts side by side, `[R, T, N * E]`: what each earlier block gave, and the sum of the current one
last. Where layers loop, what the pass before gave comes before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.clipped_attention import ClippedAttention
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.relative_attention import ShortTaps
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import CompositeState, LayerState, Layout, RecurrentState, Step


@dataclass(frozen=True, eq=False)
class BlockMixer:
    """Q mixtures of the parts of a stream: each weighs a part by the softmax of a query times the part, normed."""

    queries: Weight  # [Q, E], which stay float32
    norm: Norm  # of each part, without weights

    def __call__(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """N parts float32 `[R, T, E]` -> Q mixtures `[R, T, E]`."""
        stacked = ops.norm(torch.stack(list(parts), dim=-2), self.norm)  # [R, T, N, E]
        scores = ops.linear(stacked, self.queries) * stacked.shape[-1] ** -0.5
        shares = ops.in_double(partial(torch.softmax, dim=-2), scores)[..., None, :]  # [R, T, N, 1, Q]
        first, *others = (stacked[..., n, :, None] * shares[..., n, :, :] for n in range(len(parts)))
        for other in others:  # one after the other: a product would sum them as it likes
            first = first + other
        return first.unbind(-1)


@dataclass(frozen=True, eq=False)
class MessageGate:
    """Lets a message of the pass before into what a part reads: `(1 - tanh(forget g)) x + tanh(gain g) message`.

    g is `down [norm(x), norm(message)]`.
    """

    norm: Norm  # [E], without weights
    down: Weight  # [rank, 2 * E]
    forget: Weight  # [E, rank]
    gain: Weight  # [E, rank]

    def __call__(self, x: Tensor, message: Tensor) -> Tensor:
        low = ops.linear(torch.cat([ops.norm(x, self.norm), ops.norm(message, self.norm)], dim=-1), self.down)
        forget, gain = (ops.in_double(torch.tanh, ops.linear(low, weight)) for weight in (self.forget, self.gain))
        return (1.0 - forget) * x + gain * message


@dataclass(frozen=True, eq=False)
class PassMessages:
    """Messages of the pass before for a layer: four mixtures of the parts that the pass made, each through a gate."""

    mixer: BlockMixer  # of 4 queries
    gates: tuple[MessageGate, MessageGate, MessageGate, MessageGate]  # of queries, keys, values, the feed-forward part
    parts: int  # that the pass made, which come first in the stream
    starts: int = 0  # of the first layer of a pass: the number of parts that were there before the loop


@dataclass(frozen=True, eq=False)
class PartsLayer:
    """Attention and experts on a stream of parts, each after a norm and in front of a convolution.

    opens: its sum is that of a new block. reads: makes what attention reads; None: the last part. dropped: parts of a
    pass before, which come first and are not read any more.
    """

    attention: ClippedAttention
    input_norms: tuple[Norm, Norm, Norm]  # of queries, keys and values
    conv: ShortTaps
    mlp: FeedForward
    mlp_norm: Norm
    mlp_conv: ShortTaps
    opens: bool
    reads: BlockMixer | None
    mlp_reads: BlockMixer
    messages: PassMessages | None = None
    dropped: int = 0

    @property
    def kind(self) -> str:
        return "composite"

    def new_state(self, layout: Layout) -> LayerState:
        convs = (self.conv.new_state(layout), self.mlp_conv.new_state(layout))
        return CompositeState([*self.attention.new_states(layout), *convs])

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        """x float32 `[R, T, N * E]` -> `[R, T, M * E]`: the stream itself, and not what is added to it."""
        assert isinstance(cache, CompositeState)
        of_attention, of_keys, behind, behind_mlp = cache.members
        assert isinstance(behind, RecurrentState) and isinstance(behind_mlp, RecurrentState)
        passed, parts = self._parts(x)
        given = [] if self.messages is None else list(self.messages.mixer(passed))
        read = [parts[-1]] if self.reads is None else list(self.reads(parts))
        read = self._told(read * 3 if len(read) == 1 else read, given[:3])
        q, k, v = (ops.norm(one, each) for one, each in zip(read, self.input_norms))
        mixed = behind.advance(self.attention(q, k, v, step, of_attention, of_keys), step)
        parts = [*parts, mixed] if self.opens else [*parts[:-1], parts[-1] + mixed]
        [fed] = self._told(list(self.mlp_reads(parts)), given[3:])
        parts[-1] = parts[-1] + behind_mlp.advance(self.mlp(fed, self.mlp_norm), step)
        return torch.cat([*passed, *parts], dim=-1)

    def _parts(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The parts of the pass before, and those of this one."""
        width = len(self.input_norms[0].weight)
        parts = list(x.split(width, dim=-1))[self.dropped :]
        if self.messages is None:
            return [], parts
        count, starts = self.messages.parts, self.messages.starts
        return (parts[-count:], parts[-count - starts : -count]) if starts else (parts[:count], parts[count:])

    def _told(self, read: list[Tensor], messages: list[Tensor]) -> list[Tensor]:
        """Inputs of parts of the layer, with the messages for them."""
        if self.messages is None:
            return read
        gates = self.messages.gates[:3] if len(read) == 3 else self.messages.gates[3:]
        return [gate(one, message) for gate, one, message in zip(gates, read, messages)]


@dataclass(frozen=True, eq=False)
class MixedParts:
    """The mixture of a stream's parts that the last norm reads. dropped: as of `PartsLayer`."""

    mixer: BlockMixer
    dropped: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 `[R, T, N * E]` -> `[R, T, E]`."""
        return self.mixer(x.split(self.mixer.queries.in_features, dim=-1)[self.dropped :])[0]
