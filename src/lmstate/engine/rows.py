"""The rows that decode together: one ragged state that sequences join and leave at any step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from lmstate.state import Snapshot, State

if TYPE_CHECKING:
    from lmstate.models.model import Model

SPARE_STEPS = 64  # so long a state has twice the rows that it needs before it gives them back

Owner = TypeVar("Owner")


class RowPool(Generic[Owner]):
    """A state whose rows have owners, or none. Its rows double when they do not suffice, up to `most`, and halve again.

    A sequence joins as a snapshot, or as a state of one row that is taken as it is where nobody else decodes.
    """

    def __init__(self, model: Model, new_state: Callable[[int], State], most: int) -> None:
        self.most = most
        self._model = model
        self._new_state = new_state
        self._state: State | None = None
        self._owners: list[Owner | None] = []
        self._spare = 0

    # ---- who is in it

    @property
    def owners(self) -> list[Owner]:
        return [owner for owner in self._owners if owner is not None]

    def __len__(self) -> int:
        return len(self.owners)

    def nbytes(self) -> int:
        return 0 if self._state is None else sum(self._state.memory().values())

    def length(self, owner: Owner) -> int:
        return self._held.lengths[self._row(owner)]

    # ---- joining and leaving

    def join(self, owner: Owner, source: State | Snapshot) -> None:
        """Give `owner` a row that goes on from `source`; a state given has one row, and belongs to the pool now."""
        if isinstance(source, State):
            if not self.owners:
                self._state, self._owners, self._spare = source, [owner], 0
                return
            source = source.snapshot(0)
        row = self._free_row()
        self._held.restore(row, source)
        self._owners[row] = owner

    def rewind(self, owner: Owner, to: int) -> None:
        """Take an owner's row back to its first `to` tokens, if that computes nothing again; else leave it."""
        row, state = self._row(owner), self._held
        if to < state.lengths[row] and state.rewind_cost(row, to) == 0:
            state.rewind(row, to)

    def snapshot(self, owner: Owner) -> Snapshot:
        return self._held.snapshot(self._row(owner))

    def leave(self, owner: Owner) -> None:
        row = self._row(owner)
        self._owners[row] = None
        if not self.owners:
            self._state, self._owners = None, []  # the next one brings its own
        else:
            self._held.rewind(row, 0)

    # ---- a step

    def step(self, tokens: Mapping[Owner, Sequence[int]]) -> Tensor:
        """Have the rows of these owners read their tokens. Returns logits float32 `[R, V]`; `row` says whose are where.

        The first step after a sequence joined gives it some tokens, or it comes with its last logits.
        """
        rows = [[] if owner is None else list(tokens.get(owner, ())) for owner in self._owners]
        logits = self._model(rows, self._held)
        assert logits is not None
        return logits

    def row(self, owner: Owner) -> int:
        """Row index of the owner's logits in the result of `step`."""
        return self._row(owner)

    # ---- the parts of it

    @property
    def _held(self) -> State:
        assert self._state is not None
        return self._state

    def _row(self, owner: Owner) -> int:
        return next(row for row, other in enumerate(self._owners) if other is owner)

    def _free_row(self) -> int:
        if self._state is None:
            self._state, self._owners = self._new_state(1), [None]
        if None not in self._owners:
            count = len(self._owners)
            assert count < self.most, "more sequences than rows"
            rows = min(2 * count, self.most)
            self._state.select([*range(count), *[None] * (rows - count)])
            self._owners += [None] * (rows - count)
        return self._owners.index(None)

    def tidy(self) -> None:
        """Give rows back that nobody has used for a while. To be called between steps."""
        used = [row for row, owner in enumerate(self._owners) if owner is not None]
        if not used or 2 * len(used) > len(self._owners):
            self._spare = 0
            return
        self._spare += 1
        if self._spare >= SPARE_STEPS:
            rows: list[int | None] = [*used, *[None] * (len(self._owners) // 2 - len(used))]
            self._held.select(rows)
            self._owners = [None if row is None else self._owners[row] for row in rows]
            self._spare = 0
