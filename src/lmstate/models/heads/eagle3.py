"""EAGLE-3 (2503.01840): a head that was trained apart, and reads what a model's early, middle and late blocks made.

    b_p = fuse [stream of the early blocks; of the middle; of the late ones]  at token p
    y = [norm(embedding of token p + 1); norm(b_p)]
    g = b_p + attention(y),  g = g + mlp(norm(g)),  logits = head(norm(g))

It drafts on from g in the place of b. It may know the most usual tokens of the vocabulary alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.block import Block
from lmstate.models.heads.head import DraftHead
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import LayerState, Step


@dataclass(frozen=True, eq=False)
class Eagle3Block(Block):
    """A block whose mixer reads an embedding beside the stream: `[R, T, 2 * E]` -> `[R, T, E]`.

    `mixer_norm` is of the embedding, `hidden_norm` of the stream. `adds_normed`: what the mixer makes is added to the
    normed stream.
    """

    fusable: ClassVar[bool] = False
    hidden_norm: Norm | None = None
    adds_normed: bool = False

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        assert self.mixer_norm is not None and self.hidden_norm is not None
        embedded, before = (part.contiguous() for part in x.chunk(2, dim=-1))
        normed = ops.norm(before, self.hidden_norm)
        both = torch.cat([ops.norm(embedded, self.mixer_norm), normed], dim=-1)
        mixed = self.mixer(both, step, cache, None, Residual(normed if self.adds_normed else before))
        return mixed if self.mlp is None else self.feed(mixed, mixed)


@dataclass(frozen=True, eq=False)
class Eagle3Head(DraftHead):
    """Weights of the head. `tokens` int64 `[V']`: the tokens that it knows, in the order of its logits; None: all.

    `fuse_norm`: of what `fuse` reads, in EAGLE 3.1.
    """

    taps: tuple[int, ...]
    fuse: Weight  # [E, 3 * E'] over the model's E'
    blocks: tuple[Block, ...]
    norm: Norm
    embed: Weight  # [V, E]
    head: Weight  # [V', E]
    vocab: int
    tokens: Tensor | None = None
    fuse_norm: Norm | None = None
    depth: int = 1

    def reads(self, stream: Tensor, norm: Norm, tapped: Sequence[Tensor]) -> Tensor:
        streams = torch.cat(list(tapped), dim=-1)
        return ops.linear(streams if self.fuse_norm is None else ops.norm(streams, self.fuse_norm), self.fuse)

    def joined(self, before: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([self.embed.rows(tokens), before], dim=-1)

    def handed_on(self, stream: Tensor) -> Tensor:
        return stream

    def logits(self, stream: Tensor) -> Tensor:
        known = ops.linear(stream, self.head, norm=self.norm)
        if self.tokens is None:
            return known
        return known.new_full((*known.shape[:-1], self.vocab), -torch.inf).index_copy_(-1, self.tokens, known)
