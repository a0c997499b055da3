"""States of layers whose positions are not the tokens': they run some tokens behind, or have one for several tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from lmstate.state.changes import Changes
from lmstate.state.layers.base import LayerState
from lmstate.state.layers.composite import CompositeState
from lmstate.state.step import Step


class PlanSlot:
    """Place of a plan of the blocks that use the members, see `lmstate.models.stack`."""

    decode_plan: object = None


class MovedState(CompositeState):
    """Layer states that have `own_length(n)` positions of a row of n tokens, which never shrinks as n grows."""

    @abstractmethod
    def own_length(self, length: int) -> int:
        """Number of positions that the members have of a row of this length."""

    @abstractmethod
    def first_length(self, position: int) -> int:
        """The smallest length of a row at which they have `position` positions."""

    def step(self, step: Step) -> Step:
        """A step, or a part of one, as the members see it."""

        def make() -> Step:
            starts = tuple(map(self.own_length, step.starts))
            counts = tuple(self.own_length(end) - start for start, end in zip(starts, step.ends))
            return step.part(starts, counts)

        return step.cached((type(self), self.key), make)

    @property
    @abstractmethod
    def key(self) -> int:
        """Number that two of a class share if they see steps alike."""

    def reserve(self, step: Step) -> None:
        super().reserve(self.step(step))

    def commit(self, step: Step, accepted: tuple[int, ...], changes: Changes) -> None:
        own = self.step(step)
        ends = (start + count for start, count in zip(step.starts, accepted))
        counts = tuple(self.own_length(end) - start for start, end in zip(own.starts, ends))
        super().commit(own, counts, changes)

    def earliest_rewind(self, row: int, length: int) -> int:
        earliest = super().earliest_rewind(row, self.own_length(length))
        return self.first_length(earliest) if earliest else 0

    def rewind(self, row: int, length: int, to: int, changes: Changes) -> None:
        super().rewind(row, self.own_length(length), self.own_length(to), changes)

    def add_row(self, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        super().add_row(self.own_length(length), tensors, changes)

    def capture(self, row: int, length: int) -> Mapping[str, Tensor]:
        return super().capture(row, self.own_length(length))

    def restore(self, row: int, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        super().restore(row, self.own_length(length), tensors, changes)


class DelayedState(MovedState):
    """Layer states that do not see the first `delay` tokens of a row: token p is their position `p - delay`.

    A multi-token prediction head reads a token together with what was made of the one before it, and there is nothing
    before the first.
    """

    def __init__(self, members: Sequence[LayerState], delay: int):
        super().__init__(members)
        self.delay = delay
        self.whole, self.remembering = PlanSlot(), PlanSlot()

    @property
    def key(self) -> int:
        return self.delay

    def own_length(self, length: int) -> int:
        return max(0, length - self.delay)

    def first_length(self, position: int) -> int:
        return position + self.delay

    def kept(self, row: int, length: int) -> list[list[int]]:
        return [[place + self.delay for place in head] for head in super().kept(row, self.own_length(length))]

    def drop(self, row: int, length: int, start: int, stop: int, changes: Changes) -> None:
        first, own = self.own_length(start), self.own_length(length)
        last = min(first + stop - start, own)
        if first < last:
            super().drop(row, own, first, last, changes)


class PooledState(MovedState):
    """Layer states with a position for each `rate` tokens of a row, written when the last of them is there."""

    def __init__(self, members: Sequence[LayerState], rate: int):
        super().__init__(members)
        self.rate = rate

    @property
    def key(self) -> int:
        return self.rate

    def own_length(self, length: int) -> int:
        return length // self.rate

    def first_length(self, position: int) -> int:
        return position * self.rate

    def refuses_drop(self, row: int) -> str | None:
        return f"an entry of it stands for {self.rate} tokens, at fixed positions"
