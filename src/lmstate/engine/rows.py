"""The rows that decode together: one ragged state that sequences join and leave at any step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from lmstate.ops.types.block_table import KVBlock
from lmstate.state import Snapshot, State

if TYPE_CHECKING:
    from lmstate.models.model import Model

IDLE = 2  # steps of all rows: when idle ones have taken part in as many, to copy the others costs less

Owner = TypeVar("Owner")


class RowPool(Generic[Owner]):
    """A state whose rows have owners, or none. A row is added where none is free, and given back when long unused.

    A sequence joins as a snapshot, or as a state of one row that is taken as it is where no other sequence decodes.
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

    def __contains__(self, owner: Owner) -> bool:
        return any(other is owner for other in self._owners)

    def blocks(self) -> Iterator[KVBlock]:
        return iter(()) if self._state is None else self._state.blocks()

    def nbytes_apart(self) -> int:
        """Bytes of its state that are in no blocks."""
        return 0 if self._state is None else self._state.nbytes_apart()

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
        if self._state is None:
            self._state, self._owners = self._new_state(1), [None]
            self._state.remove(0)
        assert len(self) < self.most, "more sequences than rows"
        row = self._state.add(source)
        self._owners[row:] = [owner, *self._owners[row + 1 :]]

    def expect(self, owner: Owner, length: int) -> None:
        """Announce the length of a text that an owner's row is given in parts: see `State.expect`."""
        self._held.expect(self._row(owner), length)

    def hand_over(self, owner: Owner, other: Owner) -> None:
        """Give the row of an owner, as it is, to another one."""
        self._owners[self._row(owner)] = other

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
            self._held.remove(row)

    # ---- a step

    def step(
        self,
        tokens: Mapping[Owner, Sequence[int]],
        logits: Mapping[Owner, int],
        commit: bool = True,
        once: Collection[Owner] = (),
    ) -> Tensor:
        """Have the rows of these owners read their tokens, in one forward. Returns logits float32 `[R, K, V]` of as
        many of each owner's last tokens as are asked for; `row` says whose are where.

        commit=False: all is pending until `accept`. once: those whose tokens are never rewound into.
        """
        rows = [[] if owner is None else list(tokens.get(owner, ())) for owner in self._owners]
        wanted = [0 if owner is None else logits.get(owner, 0) for owner in self._owners]
        lasting = [owner is None or owner not in once for owner in self._owners]
        out = self._model(rows, self._held, logits=wanted, commit=commit, rewindable=lasting)
        assert out is not None
        return out

    def follow(
        self, tokens: Mapping[Owner, Sequence[int]], most: int
    ) -> tuple[dict[Owner, list[int]], Tensor] | None:  # fmt: skip
        """Have each of these owners' rows read its token and the likeliest ones after it, at most `most`: pending.

        Returns what each read, and logits as `step` does; None where the model does no such thing.
        """
        rows = [[] if owner is None else list(tokens.get(owner, ())) for owner in self._owners]
        found = self._model.follow(rows, self._held, most)
        return None if found is None else ({owner: found[0][self._row(owner)] for owner in tokens}, found[1])

    def accept(self, counts: Mapping[Owner, int]) -> None:
        """Keep the first tokens of each owner's row, of those that are pending."""
        try:
            self._held.commit([0 if owner is None else counts.get(owner, 0) for owner in self._owners])
        except BaseException:
            self._held.discard()
            raise

    def room(self, owner: Owner, most: int) -> int:
        """Number of the `most` next tokens of an owner that one step may read: see `State.step_room`."""
        return self._held.step_room(self._row(owner), most)

    @property
    def state(self) -> State:
        """The state whose rows these are; there has to be one. Another may take its place whenever a row joins."""
        return self._held

    @property
    def size(self) -> int:
        """Rows of the state, idle ones too."""
        return len(self._owners)

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

    def tidy(self) -> None:
        """Give rows back that were unused for a while: steps compute them too. To be called between steps."""
        used = [row for row, owner in enumerate(self._owners) if owner is not None]
        idle = len(self._owners) - len(used)
        self._spare = self._spare + idle if used and idle else 0
        if self._spare > IDLE * len(self._owners):
            self._held.select(used)
            self._owners = [self._owners[row] for row in used]
            self._spare = 0
