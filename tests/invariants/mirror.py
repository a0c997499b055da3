"""A state beside a plain list of tokens a row: whatever is done to both, the state must answer as if fed the list.

The oracle is recomputation: the model's plain forward over what a row should hold, without any state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import lmstate
from lmstate.models.block import Block
from lmstate.ops.types import block_table
from lmstate.state import LayerState, SourceFeatures, Step
from tests.zoo import SOUNDS, source

Source = tuple[int, ...] | SourceFeatures | None
Row = tuple[Source, tuple[int, ...]]  # and its tokens
BOUND = 1e-4
PROBE = [7, 3]
PLAIN = {int, float, bool, str, type(None), torch.device, torch.dtype}  # hold no tensors


class Mirror:
    """Where the model has an encoder, each row that has no source is given another one before it is given tokens.

    With `carries`, which no plain forward rounds, the oracle is a state that is fed the row at once, to the bit.

    A mirror that is `deferred` keeps the logits it was given for the next probe of `check`, which compares all of
    them: one plain forward over a row answers for all rows that it goes on from, and `together` it takes many rows.
    """

    def __init__(
        self, model: lmstate.Model, rows: int = 1, *, deferred: bool = False, together: bool = True, **options: Any
    ) -> None:
        self.model = model
        self.deferred = deferred
        self.together = together
        self.carries: int = options.get("carries", 32)
        self.state = model.new_state(rows, **options)
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.sources: list[Source] = [None] * rows
        self._conditioned = 0
        self._known: dict[Row, Tensor] = {}
        self._given: list[tuple[Tensor, Row]] = []
        """Logits `[N, V]` of the last tokens of a row, to be compared."""

    # ---- the same to both

    def condition(self) -> None:
        """Give the rows that have no source one."""
        for row, known in enumerate(self.sources):
            if known is None and self.model.encoder is not None and row not in self.state.removed:
                length = (5, 40, 1, 70)[self._conditioned % 4]
                self.sources[row] = source(self.model, length, seed=900 + self._conditioned)
                self.state.condition(row, self.sources[row])
                self._conditioned += 1

    def extend(self, ids: Sequence[Sequence[int]], logits: str = "last") -> None:
        self.condition()
        got = self.model([list(row) for row in ids], self.state, logits=logits)
        for row, new in zip(self.rows, ids):
            row += new
        for index, (row, new) in enumerate(zip(self.rows, ids)):
            if logits == "none":
                assert got is None
            elif logits == "last":
                if row:
                    self.given(got[index : index + 1], row, index)
                else:
                    assert got[index].isnan().all(), "a row without tokens has no logits"
            elif new:
                self.given(got[index, : len(new)], row, index)

    def draft(self, ids: Sequence[Sequence[int]], accept: Sequence[int]) -> None:
        self.condition()
        got = self.model([list(row) for row in ids], self.state, logits="all", commit=False)
        assert self.state.pending == [len(row) for row in ids]
        assert self.state.lengths == [len(row) for row in self.rows]
        for index, (row, new) in enumerate(zip(self.rows, ids)):
            if new:
                self.given(got[index, : len(new)], row + list(new), index)
        self.state.commit(list(accept))
        for row, new, n in zip(self.rows, ids, accept):
            row += new[:n]

    def rewind(self, row: int, to: int) -> None:
        self.state.rewind(row, to)
        del self.rows[row][to:]

    def select(self, rows: Sequence[int | None]) -> None:
        self.state.select(rows)
        self.rows = [[] if row is None else list(self.rows[row]) for row in rows]
        self.sources = [None if row is None else self.sources[row] for row in rows]

    def restore(self, row: int, snapshot: lmstate.Snapshot, tokens: list[int]) -> None:
        self.state.restore(row, snapshot)
        self.rows[row] = list(tokens)
        self.sources[row] = snapshot.source

    # ---- what must hold

    def check(self, probe: bool = True) -> None:
        """Lengths, tokens, bytes, and the logits of a probe on every row that is then forgotten again."""
        state = self.state
        assert state.lengths == [len(row) for row in self.rows]
        assert [state.tokens(row) for row in range(state.rows)] == self.rows
        assert state.pending == [0] * state.rows
        if self.model.device.type == "cpu":  # elsewhere blocks lie in slabs, which have room for more
            assert sum(state.memory().values()) == bytes_held(state)
        sources = [list(each) if isinstance(each, tuple) else each for each in self.sources]
        assert [state.source(row) for row in range(state.rows)] == sources
        if not probe:
            return
        self.condition()
        probed = self.model([PROBE] * state.rows, state, logits="all", commit=False)
        state.discard()
        for index, row in enumerate(self.rows):
            self.given(probed[index], row + PROBE, index)
        self._recompute(row for _, row in self._given)
        for logits, known in self._given:
            self.close(logits, self._known[known][-len(logits) :])
        self._given.clear()

    def given(self, logits: Tensor, ids: Sequence[int], row: int) -> None:
        """Compare logits `[N, V]` of the last of some ids, which read the source of a row; if deferred, keep them."""
        if self.deferred:
            self._given.append((logits, (self.sources[row], tuple(ids))))
        else:
            self.close(logits, self.expected(ids, row)[-len(logits) :])

    def _recompute(self, wanted: Iterable[Row]) -> None:
        """Know the plain forwards over some rows: as parts of those over rows that go on from them, or anew."""
        missing: list[Row] = []
        parts: dict[Row, Row] = {}
        plain = self.carries == 32  # else to the bit, so each row by itself
        for row in sorted(dict.fromkeys(wanted), key=lambda row: -len(row[1])):
            if row in self._known:
                continue
            source, ids = row
            others = [*missing, *self._known] if plain and not self.model.network.dynamic_ropes else []
            longer = next((other for other in others if other[0] == source and other[1][: len(ids)] == ids), None)
            if longer is None:
                missing.append(row)
            else:
                parts[row] = longer
        if plain and self.together and self.model.encoder is None and missing:
            found = self.model([list(ids) for _, ids in missing])
            self._known |= {row: logits[: len(row[1])] for row, logits in zip(missing, found)}
        else:
            self._known |= {row: whole(self.model, row[1], row[0], self.carries) for row in missing}
        self._known |= {row: self._known[longer][: len(row[1])] for row, longer in parts.items()}

    def expected(self, ids: Sequence[int], row: int = 0) -> Tensor:
        """float32 [len(ids), V]: the plain forward over the whole row, which reads the source of this one."""
        key = self.sources[row], tuple(ids)
        if key not in self._known:
            self._known[key] = whole(self.model, ids, key[0], self.carries)
        return self._known[key]

    def close(self, got: Tensor, expected: Tensor) -> None:
        bound = BOUND if self.carries == 32 else 0.0
        torch.testing.assert_close(got, expected, atol=bound, rtol=bound)


def whole(
    model: lmstate.Model, ids: Sequence[int], source: Sequence[int] | SourceFeatures | None = None, carries: int = 32
) -> Tensor:
    """float32 [len(ids), V]: a forward over all of a text at once. A sound is found again by its hash."""
    if source is None and carries == 32:
        return model([list(ids)])[0]
    state = model.new_state(1, carries=carries)
    state.layout = replace(state.layout, chunk=max(1, len(ids)))
    if source is not None:
        state.condition(0, SOUNDS[source.hash] if isinstance(source, SourceFeatures) else source)
    return model([list(ids)], state, logits="all")[0]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=BOUND, rtol=BOUND)


def bytes_held(state: lmstate.State) -> int:
    """Bytes of every tensor storage that hangs on a state, found by looking, not by asking."""
    seen: set[int] = set()
    storages: dict[int, int] = {}

    def walk(thing: Any) -> None:
        if type(thing) in PLAIN or id(thing) in seen or callable(thing):
            return
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict):
            for part in thing.values():
                walk(part)
        elif isinstance(thing, block_table.KVBlock):
            walk(thing.tensors)
        elif isinstance(thing, list | tuple):
            for part in thing:
                walk(part)
        elif type(thing).__module__.startswith(("lmstate.state", "lmstate.ops", "lmstate.distributed.mirror")):
            walk(vars(thing))

    walk(state)
    return sum(storages.values())


class Fault(Exception):
    """Thrown by a test into the middle of something."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FailingBlock(Block):
    """Raises, before or after another block has run in its place."""

    fusable: ClassVar[bool] = False

    whole: Block
    after: bool

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        if self.after:
            self.whole(x, step, cache)
        raise Fault


@contextmanager
def failing_layer(model: lmstate.Model, index: int, *, after: bool) -> Iterator[None]:
    """Layer `index` raises, before or after it has run."""
    network, blocks = model.network, list(model.blocks)
    blocks[index] = FailingBlock(blocks[index].mixer, None, whole=blocks[index], after=after)
    model.network = replace(network, blocks=tuple(blocks))
    try:
        yield
    finally:
        model.network = network


@contextmanager
def failing_method(thing: Any, name: str) -> Iterator[None]:
    """`thing.name` raises."""

    def fail(*_: Any, **__: Any) -> None:
        raise Fault

    whole: Callable[..., Any] = getattr(thing, name)
    setattr(thing, name, fail)
    try:
        yield
    finally:
        setattr(thing, name, whole)
