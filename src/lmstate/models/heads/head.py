"""A multi-token prediction head: a block after the model that reads the next token too (DeepSeek-V3, 2412.19437).

    h'_p = M [norm(h_p); norm(embedding of token p + 1)],  g = blocks(h'),  logits = head(norm(g))

From what the model made of token p, and the token that came after it, the logits of the one after that. A second head
reads what the first one made instead of the model's. Here an entry counts by its token, p + 1: head k has none for the
first k tokens of a row (`DelayedState`), and what was made of a row's last token waits for the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.block import Block, new_layers
from lmstate.models.layers.identity import Identity
from lmstate.models.stack import run_stack
from lmstate.ops import Norm, Weight
from lmstate.state import CompositeState, LayerState, Layout, Step
from lmstate.state.layers.delayed import DelayedState
from lmstate.state.layers.last_input import LastInputState


class DraftHead(ABC):
    """Blocks after a model that say what comes after the next token, and a layer of their own in its state.

    depth: which of several heads it is, counted from 1. taps: the numbers of blocks after which it reads the model's
    stream; none: after them all.
    """

    depth: int
    blocks: tuple[Block, ...]
    norm: Norm
    embed: Weight  # [V, E]
    taps: tuple[int, ...]

    @abstractmethod
    def reads(self, stream: Tensor, norm: Norm, tapped: Sequence[Tensor]) -> Tensor:
        """The input of the first head for each token, float32 `[R, T, E]`.

        It is made of the stream after the blocks `[R, T, E]` and the model's last norm, or of the stream at the taps.
        """

    @abstractmethod
    def joined(self, before: Tensor, tokens: Tensor) -> Tensor:
        """The stream in front of the blocks, of what was handed on `[R, T, E]` and the tokens after it `[R, T]`."""

    @abstractmethod
    def handed_on(self, stream: Tensor) -> Tensor:
        """Hidden state for the next token, and for the next head: float32 `[R, T, E]`."""

    @abstractmethod
    def logits(self, stream: Tensor) -> Tensor:
        """The stream after the blocks `[..., E]` -> float32 logits `[..., V]`; the model's softcap is not applied."""

    @property
    def width(self) -> int:
        """Number of features that are handed on of a token."""
        return len(self.norm.weight)

    def new_state(self, layout: Layout) -> LayerState:
        """Its layer state: the hidden state of each row's last token, and what its blocks remember."""
        tail = LastInputState(layout, self.width, "hidden")
        return CompositeState([tail, DelayedState(new_layers(self.blocks, [layout] * len(self.blocks)), self.depth)])

    def stream(self, before: Tensor, tokens: Tensor, step: Step, blocks: DelayedState) -> Tensor:
        """The stream after the blocks, from what was handed on of the token before each: float32 `[R, T, E]` each.

        tokens: int64 `[R, T]`, or more: those after are not read. Zero at tokens that it has no entry for.
        """
        own, x = self._projected(before, tokens, step, blocks)
        if own.width:
            x = run_stack(self.blocks, x, own, blocks.members, blocks.whole)
        return _behind(x[..., : self.width], _skipped(step, own), step.width)

    def remember(self, before: Tensor, tokens: Tensor, step: Step, blocks: DelayedState) -> None:
        """As `stream`, where only what the blocks remember is wanted: the last feed-forward part does not run."""
        own, x = self._projected(before, tokens, step, blocks)
        if own.width:
            run_stack(self._remembering, x, own, blocks.members, blocks.remembering)

    @cached_property
    def _remembering(self) -> tuple[Block, ...]:
        """The blocks up to the last mixer."""
        last = max((at for at, block in enumerate(self.blocks) if not isinstance(block.mixer, Identity)), default=0)
        return (*self.blocks[:last], replace(self.blocks[last], mlp=None, output_hook=None))

    def _projected(self, before: Tensor, tokens: Tensor, step: Step, blocks: DelayedState) -> tuple[Step, Tensor]:
        """The step as the blocks see it, and the stream in front of them."""
        own = blocks.step(step)
        x = self.joined(before, tokens[:, : before.shape[1]])
        return own, _without_first(x, _skipped(step, own), own.width)


@dataclass(frozen=True, eq=False)
class PredictionHead(DraftHead):
    """A head that came with its model.

    chained_norm: what is handed on from token to token and from head to head is normed, as what the model hands to the
    first head is; else it is the residual stream.
    """

    depth: int
    embed_norm: Norm
    hidden_norm: Norm
    project: Weight  # [E, 2 * E], over the embedding and then the hidden state
    blocks: tuple[Block, ...]
    norm: Norm
    embed: Weight  # [V, E]
    head: Weight  # [V, E]
    head_bias: Tensor | None = None
    chained_norm: bool = True
    hidden_first: bool = False  # the projection is over the hidden state and then the embedding
    taps: tuple[int, ...] = ()

    def reads(self, stream: Tensor, norm: Norm, tapped: Sequence[Tensor]) -> Tensor:
        return ops.norm(stream, norm) if self.chained_norm else stream

    def joined(self, before: Tensor, tokens: Tensor) -> Tensor:
        embedded, before = ops.norm(self.embed.rows(tokens), self.embed_norm), ops.norm(before, self.hidden_norm)
        pair = (before, embedded) if self.hidden_first else (embedded, before)
        return ops.linear(torch.cat(pair, dim=-1), self.project)

    def handed_on(self, stream: Tensor) -> Tensor:
        return ops.norm(stream, self.norm) if self.chained_norm else stream

    def logits(self, stream: Tensor) -> Tensor:
        return ops.linear(stream, self.head, self.head_bias, norm=self.norm)


def parts(cache: LayerState) -> tuple[LastInputState, DelayedState]:
    """The hidden states of the rows' last tokens, and the state of the blocks, of a head's layer state."""
    assert isinstance(cache, CompositeState)
    tail, blocks = cache.members
    assert isinstance(tail, LastInputState) and isinstance(blocks, DelayedState)
    return tail, blocks


def _skipped(step: Step, own: Step) -> list[int]:
    """Number of each row's first tokens that the blocks do not see."""
    return [count - kept for count, kept in zip(step.counts, own.counts)]


def _without_first(x: Tensor, skipped: list[int], width: int) -> Tensor:
    """The rows of `[R, T, E]` without their first tokens, `[R, width, E]`."""
    if len(set(skipped)) == 1:
        return x[:, skipped[0] : skipped[0] + width].contiguous()
    cut = x.new_zeros(x.shape[0], width, x.shape[2])
    for row, first in enumerate(skipped):
        kept = x[row, first : first + width]
        cut[row, : len(kept)] = kept
    return cut


def _behind(x: Tensor, skipped: list[int], width: int) -> Tensor:
    """The inverse, `[R, width, E]`: zero where tokens were taken away."""
    if not any(skipped):
        return x
    whole = x.new_zeros(x.shape[0], width, x.shape[2])
    for row, first in enumerate(skipped):
        whole[row, first : first + x.shape[1]] = x[row, : width - first]
    return whole
