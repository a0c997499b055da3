"""Drafters that fill a block of masks at once, beside what they made of a model's hidden states (DFlash, DSpark)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.heads.head import DraftHead
from lmstate.ops import Weight
from lmstate.state import LayerState, Step


class NextDraft(NamedTuple):
    """Logits `[R, V]` of a draft, and how sure of its most likely token the drafter is `[R]`.

    None: as sure as that is probable.
    """

    logits: Tensor
    sure: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Chained:
    """The part of DSpark that reads the token before: logits that are added, and how sure the drafter is.

    `sure` None: as sure as the chosen token is probable. `sure_of_stream`: it reads the stream alone.
    """

    before: Weight  # [V, rank]
    after: Weight  # [V, rank]
    sure: Weight | None = None  # [1, E + rank]
    sure_bias: Tensor | None = None  # float32 [1]
    sure_of_stream: bool = False

    def next(self, logits: Tensor, stream: Tensor, token: Tensor) -> NextDraft:
        """A draft after the tokens int64 `[R]`, of logits `[R, V]` without them and what `sure` reads `[R, E]`."""
        before = self.before.rows(token)
        logits = logits + ops.linear(before, self.after)
        if self.sure is None:
            return NextDraft(logits)
        told = stream if self.sure_of_stream else torch.cat([stream, before], dim=-1)
        return NextDraft(logits, ops.sigmoid(ops.linear(told, self.sure, self.sure_bias))[:, 0])


class BlockHead(DraftHead):
    """A drafter whose block is `size` tokens: the next one, and `mask` in place of the others.

    Its layers have keys of the text's tokens, which `read_context` makes of the model's hidden states.
    """

    size: int
    mask: int
    depth: int = 1

    def handed_on(self, stream: Tensor) -> Tensor:
        raise AssertionError("a block of drafts is made at once")

    @property
    @abstractmethod
    def drafts(self) -> int:
        """Number of tokens that a block drafts."""

    @abstractmethod
    def read_context(self, context: Tensor, step: Step, caches: Sequence[LayerState]) -> None:
        """Keep the keys of what was made of a step's tokens, `[R, T, E]`."""

    @abstractmethod
    def drafted(self, tokens: Tensor, step: Step, caches: Sequence[LayerState]) -> Tensor:
        """The stream after the blocks, `[R, T, E]`, of a block of tokens int64 `[R, T]` that a step makes room for."""

    @abstractmethod
    def next(self, stream: Tensor, at: int, token: Tensor) -> NextDraft:
        """Draft `at` of the stream after the blocks `[R, T, E]`, after the tokens int64 `[R]`."""
