"""Hooks between a model's embedding and its blocks, and between these and its last norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from lmstate import ops
from lmstate.ops import Norm, Weight
from lmstate.state import Step


class EmbeddingHook(Protocol):
    """Between the embedding and the first block: x float32 `[R, T, E]` and tokens int64 `[R, T]` -> the stream."""

    reads_tokens: ClassVar[bool]
    """Whether blocks get more of a token than its embedding tells."""

    def __call__(self, x: Tensor, tokens: Tensor, step: Step) -> Tensor: ...


class OutputHook(Protocol):
    """Between the last block and the last norm: the stream -> float32 `[R, T, E]`."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class NormedEmbedding:
    """Normalizes the embedding."""

    reads_tokens: ClassVar[bool] = False

    norm: Norm

    def __call__(self, x: Tensor, tokens: Tensor, step: Step) -> Tensor:
        return ops.norm(x, self.norm)


@dataclass(frozen=True, eq=False)
class LearnedPositions:
    """Adds to the embedding what was learned for each of P positions; there are no others. Then normalizes the sum."""

    reads_tokens: ClassVar[bool] = False

    table: Weight  # [P, E]
    norm: Norm | None = None

    @property
    def count(self) -> int:
        return self.table.out_features

    def __call__(self, x: Tensor, tokens: Tensor, step: Step) -> Tensor:
        x = x + self.table.rows(step.positions.clamp(max=self.count - 1))  # padding may stand beyond them
        return x if self.norm is None else ops.norm(x, self.norm)


@dataclass(frozen=True, eq=False)
class NormedStream:
    """Normalizes the stream after a part of a block, as in the first transformers."""

    norm: Norm

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return ops.norm(x, self.norm)
