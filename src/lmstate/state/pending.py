"""The step of a state that was planned, or awaits its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lmstate.errors import StateError
from lmstate.state.step import Step


@dataclass(frozen=True)
class Pending:
    """A step that was planned. It awaits its verdict once it is `ready`; one that never got so counts for nothing."""

    step: Step
    ids: list[list[int]]
    logits: Tensor | None = None  # [R, T, V] of every token, [R, V] of the last ones, or [R, K, V] of the `kept` last
    kept: Sequence[int] | None = None
    refused: StateError | None = None  # why no verdict but `discard` can be given
    ready: bool = False  # its forward is done

    @property
    def waits(self) -> bool:
        """Whether nothing else can come before a verdict. A step of no tokens may be given one, and needs none."""
        return self.ready and (any(self.step.counts) or self.refused is not None)

    def logits_at(self, row: int, accepted: int) -> Tensor | None:
        """The logits `[V]` after a row's last accepted token, if the forward computed them."""
        logits, count = self.logits, self.step.counts[row]
        if logits is None:
            return None
        if logits.ndim == 2:
            return logits[row] if accepted == count else None
        first = 0 if self.kept is None else count - self.kept[row]
        return logits[row, accepted - 1 - first] if accepted > first else None
