"""The state of a layer that runs some tokens behind its row: its first entry is of a later token than the row's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lmstate.state.changes import Changes
from lmstate.state.layers.base import LayerState
from lmstate.state.layers.composite import CompositeState
from lmstate.state.step import Step


class PlanSlot:
    """Place of a plan of the blocks that use the members, see `lmstate.models.stack`."""

    decode_plan: object = None


class DelayedState(CompositeState):
    """Layer states that do not see the first `delay` tokens of a row: token p is their position `p - delay`.

    A multi-token prediction head reads a token together with what was made of the one before it, and there is nothing
    before the first.
    """

    def __init__(self, members: Sequence[LayerState], delay: int):
        super().__init__(members)
        self.delay = delay
        self.whole, self.remembering = PlanSlot(), PlanSlot()

    def step(self, step: Step) -> Step:
        """A step, or a part of one, as the members see it."""

        def make() -> Step:
            starts = tuple(map(self._length, step.starts))
            counts = tuple(self._length(end) - start for start, end in zip(starts, step.ends))
            return step.part(starts, counts)

        return step.cached(("delayed", self.delay), make)

    def _length(self, length: int) -> int:
        return max(0, length - self.delay)

    def reserve(self, step: Step) -> None:
        super().reserve(self.step(step))

    def commit(self, step: Step, accepted: tuple[int, ...], changes: Changes) -> None:
        own = self.step(step)
        ends = (start + count for start, count in zip(step.starts, accepted))
        counts = tuple(self._length(end) - start for start, end in zip(own.starts, ends))
        super().commit(own, counts, changes)

    def earliest_rewind(self, row: int, length: int) -> int:
        earliest = super().earliest_rewind(row, self._length(length))
        return earliest + self.delay if earliest else 0

    def rewind(self, row: int, length: int, to: int, changes: Changes) -> None:
        super().rewind(row, self._length(length), self._length(to), changes)

    def add_row(self, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        super().add_row(self._length(length), tensors, changes)

    def capture(self, row: int, length: int) -> Mapping[str, Tensor]:
        return super().capture(row, self._length(length))

    def restore(self, row: int, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        super().restore(row, self._length(length), tensors, changes)

    def kept(self, row: int, length: int) -> list[list[int]]:
        return [[place + self.delay for place in head] for head in super().kept(row, self._length(length))]

    def drop(self, row: int, length: int, start: int, stop: int, changes: Changes) -> None:
        first, own = self._length(start), self._length(length)
        last = min(first + stop - start, own)
        if first < last:
            super().drop(row, own, first, last, changes)
