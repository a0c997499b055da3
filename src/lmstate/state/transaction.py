"""The transaction of a state: a step is planned, run by the model, and then committed, in part or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate.errors import CapacityError, PendingError, StateError, UnsupportedError
from lmstate.state.integers import whole_number
from lmstate.state.layer import Install, LayerState, Layout
from lmstate.state.rows import Mark, Row
from lmstate.state.step import DeviceStep, Step, as_counts
from lmstate.state.tree import PendingTree


@dataclass(frozen=True)
class Pending:
    """A step that ran and awaits its verdict."""

    step: Step
    ids: list[list[int]]
    logits: Tensor | None = None  # [R, T, V] of every token, or [R, V] of the last ones
    refused: StateError | None = None  # why no verdict but `discard` can be given

    @property
    def waits(self) -> bool:
        """Whether nothing else can come before a verdict. A step of no tokens may be given one, and needs none."""
        return any(self.step.counts) or self.refused is not None


@dataclass(frozen=True)
class Left:
    """What a step that ran from device tensors leaves; nobody on the host has seen it yet."""

    tokens: Tensor  # int64 [R, T]
    counts: Tensor | None  # int64 [R]; None: T in every row
    logits: Tensor  # as in Pending


class Transaction:
    """The rows of a state and its layers, and the only way to give them tokens.

    `plan` has every layer reserve room, or none; the model runs; `commit` alone makes tokens real, `discard` none of
    them. Rows whose layers miss tokens (after a rewind far back, say) have a backlog, which a step of its own computes
    first.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        layout: Layout,
        *,
        vocab_size: int,
        fingerprint: Callable[[], str],
        user: Callable[[], object],
        regime: Callable[[int], int],
    ):
        """`fingerprint()` names the model; it is asked for only by snapshots, and for a model that is not `user()`.

        `regime(length)` is for ropes whose frequencies depend on the length of the text: two lengths of the same regime
        rotate alike, and a row that passes from one to another is computed again from its start.
        """
        self.layers = list(layers)
        self.layout = layout
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self.user = user  # the model that has the state now, a weak reference: a copy of the state copies no model
        self._regime = regime
        self._rows = [Row() for _ in range(layout.rows)]
        self._pending: Pending | None = None
        self._tree: PendingTree | None = None
        # Of a static state: where each row's next token goes, int64 [R], and a step that ran without the host.
        self._positions = torch.zeros(layout.rows if layout.static else 0, dtype=torch.int64, device=layout.device)
        self._left: Left | None = None

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """The name of the model that made it, see `Snapshot`."""
        return self._fingerprint()

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [len(row.tokens) for row in self._rows]

    @property
    def pending(self) -> list[int]:
        """Tokens of each row that await a verdict."""
        self._adopt()
        if self._tree is not None:
            return list(self._tree.counts)
        return list(self._pending.step.counts) if self._pending else [0] * self.rows

    def step_room(self, row: int, most: int) -> int:
        """How many of `most` new tokens one step may bring to a row and compute each as if it came alone.

        The rest does not fit, or the frequencies of its rope change on the way, or a policy evicts after each step.
        """
        _, own = self._row(row)
        held = len(own.tokens)
        limits = (self.layout.capacity, self.layout.max_positions)
        room = max(0, min([most, *(limit - held for limit in limits if limit is not None)]))
        if room > 1 and any(part.evicts for layer in self.layers for part in layer.parts()):
            return 1
        while room > 1 and self._regime(held + room) != self._regime(held + 1):
            room -= 1
        return room

    # ---- a step, for the model that runs it

    def plan(self, ids: Sequence[Sequence[int]], *, tentative: bool = False) -> Step:
        """Reserve room for new tokens in every layer, or in none: the step is pending until `commit` or `discard`."""
        counts = tuple(map(len, ids))
        assert all(row.cached == len(row.tokens) for row in self._rows), "plan before the backlog was computed"
        return self._reserve([list(row) for row in ids], tentative, self._horizons(counts))

    def backlog(self, counts: Sequence[int], *, logits: bool) -> list[list[int]]:
        """The committed tokens that the layers must see (again) before a step of `counts` new tokens can run.

        With `logits`, an idle row whose last logits are unknown reads its last token again. Raises `PendingError` or
        `CapacityError` if the step cannot be.
        """
        self._refuse_pending("take more tokens")
        if len(counts) != self.rows:
            raise StateError(f"{len(counts)} rows of tokens were given to a state of {self.rows}; idle rows are []")
        self._fits(counts)
        horizons = self._horizons(counts)
        for index, (row, count, horizon) in enumerate(zip(self._rows, counts, horizons)):
            regime = self._regime(horizon)
            if row.cached and regime != row.regime:
                self._forget(index, 0)
            if not row.cached:
                row.regime = regime
            unknown = row.logits is None and row.cached == len(row.tokens) > 0
            if logits and not count and unknown:
                self._forget(index, len(row.tokens) - 1)
        return [row.tokens[row.cached :] for row in self._rows]

    def plan_backlog(self, ids: list[list[int]], counts: Sequence[int]) -> Step:
        """Reserve room for the backlog; `commit_backlog` makes it real. `counts`: the new tokens that come after it."""
        return self._reserve(ids, False, self._horizons(counts))

    def commit_backlog(self, last: Tensor | None) -> None:
        """The layers have seen the backlog; `last` float32 `[R, V]` are the logits after it."""
        assert self._pending is not None
        step = self._pending.step
        self._install([layer.commit(step, step.counts) for layer in self.layers])
        for index, (row, count) in enumerate(zip(self._rows, step.counts)):
            row.cached += count
            if count and last is not None:
                row.logits = self._known(row, last[index].clone())
        self._pending = None
        self._publish()

    def ran(self, logits: Tensor | None) -> None:
        """The pending step's forward is done; its logits are `[R, T, V]`, or `[R, V]` of the last tokens."""
        assert self._pending is not None
        self._pending = Pending(self._pending.step, self._pending.ids, logits)

    def device_step(self, width: int, counts: Tensor | None = None) -> tuple[DeviceStep, Tensor]:
        """A step of `width` tokens a row, planned without a look at the host; and which rows take part, bool `[R]`.

        `counts` int64 `[R]`: how many of them are real; None: all. A row that has no room for them, or whose layers
        miss some of its tokens, or whose count is none of 0 to `width`, takes no part: nothing of it is written, and
        `commit` says why. Only a static state has such steps. `left` is what makes the tokens pending.
        """
        if not self.layout.static or self.layout.capacity is None:
            raise UnsupportedError("a step from device tensors needs a state made with new_state(..., static=True)")
        if self._left is not None or (self._pending is not None and self._pending.waits):
            raise PendingError("cannot take more tokens: there are pending ones; call commit or discard first")
        self.discard()
        if width > min(self.layout.chunk, self.layout.capacity):
            raise CapacityError(
                f"a step of {width} tokens was asked for; this state takes at most "
                f"{min(self.layout.chunk, self.layout.capacity)} at a time: feed them in parts"
            )
        if counts is None:
            counts = torch.full_like(self._positions, width)
        room = (counts >= 0) & (counts <= width) & (self._positions + counts <= self.layout.capacity)
        return DeviceStep(self._positions, torch.where(room, counts, 0), width), room

    def fixed(self) -> list[Tensor]:
        """Of a static state, all that a device step reads and changes: these tensors never move."""
        return [self._positions, *(tensor for layer in self.layers for tensor in layer.fixed().values())]

    def left(self, tokens: Tensor, counts: Tensor | None, logits: Tensor) -> None:
        """A device step ran over `tokens` int64 `[R, T]`: they are pending."""
        self._left = Left(tokens, counts, logits)

    def last_logits(self) -> list[Tensor | None]:
        """Of each row: float32 `[V]` after its last committed token, where known."""
        return [row.logits for row in self._rows]

    # ---- the verdict

    def commit(self, counts: int | Sequence[int] | None = None) -> None:
        """Make the first `counts[r]` pending tokens of each row real: all by default, a number for every row alike.

        The rest never happened. Raises `PendingError` if nothing is pending or a count is more than is pending.
        """
        self._adopt()
        if self._tree is not None:
            raise PendingError("commit was asked for, but a tree is pending; call commit_path or discard")
        pending = self._pending
        if pending is None:
            raise PendingError("commit was asked for, but nothing is pending; call the model with commit=False first")
        if pending.refused is not None:
            self.discard()
            raise pending.refused
        step = pending.step
        accepted = as_counts(counts, step.counts)
        if accepted is None:
            raise PendingError(f"commit({counts}) does not fit: the pending tokens of the rows are {list(step.counts)}")
        if not any(accepted):
            self.discard()
            return
        installs = [layer.commit(step, accepted) for layer in self.layers]
        self._install(installs)
        for index, (row, ids, n) in enumerate(zip(self._rows, pending.ids, accepted)):
            if n:
                row.tokens += ids[:n]
                row.cached += n
                row.logits = self._known(row, _logits_at(pending.logits, index, n, step.counts[index]))
        self._pending = None
        self._publish()

    def commit_path(self, paths: Sequence[Sequence[int]]) -> None:
        """Make one path of each row's pending tree real, and nothing else of it.

        paths: for each row the indices of nodes from the top down; an empty one accepts nothing. Raises `PendingError`
        if no tree is pending, or a path is none.
        """
        tree = self._tree
        if tree is None:
            raise PendingError(
                "commit_path was asked for, but no tree is pending; call the model with parents=... first"
            )
        chosen = tree.chosen(paths)
        counts = [0] * tree.state.rows
        for branch, path in zip(chosen, paths):
            counts[branch] = len(path)
        forked = tree.state
        self._tree = None
        forked.commit(counts)
        forked.select(chosen)
        self.layers, self._rows = forked.layers, forked._rows
        self._publish()

    def ran_tree(self, tree: PendingTree) -> None:
        """A tree's forward is done: it is pending until `commit_path` or `discard`."""
        self._tree = tree

    def discard(self) -> None:
        """The pending tokens never happened. Harmless if nothing is pending."""
        self._adopt()
        self._tree = None
        if self._pending is not None:
            self._pending = None
            for layer in self.layers:
                layer.discard()

    # ---- the parts of it

    def _row(self, row: int) -> tuple[int, Row]:
        """A row that a caller named: its number as a plain int, and what is known of it."""
        number = whole_number(row, "a row")
        if not 0 <= number < self.rows:
            raise StateError(f"row {row} was asked for; the state has the rows 0 to {self.rows - 1}")
        return number, self._rows[number]

    def _refuse_pending(self, what: str, row: int | None = None) -> None:
        pending = self.pending
        waits = self._tree is not None or (self._pending is not None and self._pending.waits)
        if waits and (row is None or pending[row] or self._tree is not None):
            raise PendingError(f"cannot {what}: the rows have {pending} pending tokens; call commit or discard first")
        if not waits:
            self.discard()

    def _fits(self, counts: Sequence[int]) -> None:
        capacity, max_positions = self.layout.capacity, self.layout.max_positions
        for index, (row, count) in enumerate(zip(self._rows, counts)):
            given = f"row {index} holds {len(row.tokens)} tokens and was given {count} more"
            if capacity is not None and len(row.tokens) + count > capacity:
                raise CapacityError(
                    f"{given}; the state was made with capacity={capacity}: rewind or drop tokens, or make a larger "
                    "state"
                )
            if max_positions is not None and len(row.tokens) + count > max_positions:
                raise CapacityError(f"{given}; the model has learned {max_positions} positions and knows no others")

    def _horizons(self, counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(len(row.tokens) + count for row, count in zip(self._rows, counts))

    def _reserve(self, ids: list[list[int]], tentative: bool, horizons: tuple[int, ...]) -> Step:
        counts = tuple(map(len, ids))
        starts = tuple(row.cached for row in self._rows)
        step = Step(starts, counts, self.layout.device, horizons, tentative, self.layout.chunk)
        try:
            for layer in self.layers:
                layer.reserve(step)
        except BaseException:
            for layer in self.layers:
                layer.discard()
            raise
        self._pending = Pending(step, ids)
        return step

    def _adopt(self) -> None:
        """If a device step has run, make it the pending step: the one place where the host waits for its tokens."""
        if (left := self._left) is None:
            return
        self._left = None
        tokens = left.tokens.tolist()
        wanted = [len(ids) for ids in tokens] if left.counts is None else left.counts.tolist()
        counts, refused = list(wanted), None
        for index, (row, count) in enumerate(zip(self._rows, wanted)):
            if not 0 <= count <= len(tokens[index]):
                refused = StateError(
                    f"{count} tokens of row {index} were said to be real, in a step of {len(tokens[index])}: give "
                    f"counts from 0 to {len(tokens[index])}"
                )
            elif (late := len(row.tokens) - row.cached) and count:
                refused = StateError(
                    f"{late} tokens of row {index} are still to be computed, and a device step cannot do it: run "
                    "model([[]] * rows, state) first"
                )
            else:
                try:
                    self._fits([count if i == index else 0 for i in range(self.rows)])
                    continue
                except CapacityError as error:
                    refused = error
            counts[index] = 0
        starts = tuple(row.cached for row in self._rows)
        ends = tuple(start + count for start, count in zip(starts, counts))
        step = Step(starts, tuple(counts), self.layout.device, ends, True, self.layout.chunk)
        for layer in self.layers:
            layer.adopt(step)
        self._pending = Pending(step, [ids[:n] for ids, n in zip(tokens, counts)], left.logits, refused)

    def _publish(self) -> None:
        """Tell the device where the rows stand. A row that misses tokens stands where no step has room."""
        if self.layout.static:
            full = self.layout.capacity
            at = [row.cached if row.cached == len(row.tokens) else full for row in self._rows]
            self._positions.copy_(torch.tensor(at))

    def _install(self, installs: Sequence[Install | None]) -> None:
        for install in installs:
            if install is not None:
                install()

    def _known(self, row: Row, logits: Tensor | None) -> Tensor | None:
        """The logits after a row's last token, where its layers are of the regime that a text of its length has.

        A draft may pass a border that what is accepted of it does not: they are unknown until a call asks for them.
        """
        return logits if row.regime == self._regime(len(row.tokens)) else None

    def _base(self, row: int, to: int) -> tuple[int, Mark | None]:
        """The last position at or before `to` that needs no token computed, and the mark that holds it, if one does.

        A mark is of use only beside layers of its own regime: it holds those that forget, and the others as they are
        now go on from it.
        """
        own = self._rows[row]
        if to >= own.cached:
            return own.cached, None
        if to >= max((layer.reach(row, own.cached) for layer in self.layers), default=0):
            return to, None
        marks = [mark for mark in own.marks if mark.at <= to and mark.regime == own.regime]
        last = max(marks, key=lambda mark: mark.at, default=None)
        return (0, None) if last is None else (last.at, last)

    def _forget(self, row: int, to: int) -> None:
        """Take the layers of a row back to `to`, or as little before it as can be. Its tokens stay."""
        own = self._rows[row]
        base, mark = self._base(row, to)
        if base == own.cached:
            return
        installs = []
        for index, layer in enumerate(self.layers):
            if mark is not None and layer.forgets:
                installs.append(layer.restore(row, base, mark.layers[index]))
            elif base == 0:
                installs.append(layer.restore(row, 0, {}))
            else:
                installs.append(layer.rewind(row, own.cached, base))
        self._install(installs)
        own.cached = base
        self._publish()


def _logits_at(logits: Tensor | None, row: int, accepted: int, count: int) -> Tensor | None:
    """The logits after a row's last accepted token, if the forward computed them."""
    if logits is None:
        return None
    if logits.ndim == 3:
        return logits[row, accepted - 1].clone()
    return logits[row].clone() if accepted == count else None
