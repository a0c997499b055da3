"""The inference state of a batch of sequences: the only thing that knows a position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmstate.errors import (
    CapacityError,
    PendingError,
    RewindError,
    SnapshotError,
    StateError,
    UnsupportedError,
)
from lmstate.state.layer import Install, LayerState, Layout
from lmstate.state.snapshot import Snapshot
from lmstate.state.step import DeviceStep, Step, as_counts

MARKS = 8  # checkpoints that a row keeps; the oldest goes first


@dataclass(frozen=True)
class Pending:
    """A step that ran and awaits its verdict."""

    step: Step
    ids: list[list[int]]
    logits: Tensor | None = None  # [R, T, V] of every token, or [R, V] of the last ones
    refused: StateError | None = None  # why no verdict but `discard` can be given


@dataclass(frozen=True)
class Left:
    """What a step that ran from device tensors leaves; nobody on the host has seen it yet."""

    tokens: Tensor  # int64 [R, T]
    counts: Tensor | None  # int64 [R]; None: T in every row
    logits: Tensor  # as in Pending


@dataclass(frozen=True)
class Mark:
    """What a row was at one position, for the layers that forget."""

    at: int
    layers: dict[int, dict[str, Tensor]]
    logits: Tensor | None

    def tensors(self) -> Iterable[Tensor]:
        yield from (tensor for layer in self.layers.values() for tensor in layer.values())
        if self.logits is not None:
            yield self.logits


@dataclass
class Row:
    """What the state knows of one sequence."""

    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # how many of the tokens the layers have seen; the rest is computed by the next call
    regime: int = 0  # what the cached keys were rotated for, see State
    logits: Tensor | None = None  # [V] after the last token
    marks: list[Mark] = field(default_factory=list)

    def fork(self) -> Row:
        return Row(list(self.tokens), self.cached, self.regime, self.logits, list(self.marks))


class State:
    """Everything that a model remembers of `rows` sequences. Made by `model.new_state`.

    A step is planned, run by the model, and then committed, in part or not at all; only a commit moves a length. Every
    method either does all of what it says or raises a `StateError` and changes nothing.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        layout: Layout,
        *,
        vocab_size: int | None = None,
        fingerprint: Callable[[], str] = str,
        regime: Callable[[int], int] | None = None,
    ):
        """`fingerprint()` names the model; it is asked for only by snapshots.

        `regime(length)` is for ropes whose frequencies depend on the length of the text: two lengths of the same regime
        rotate alike, and a row that passes from one to another is computed again from its start.
        """
        self.layers = list(layers)
        self.layout = layout
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self._regime = regime or (lambda length: 0)
        self._rows = [Row() for _ in range(layout.rows)]
        self._pending: Pending | None = None
        # Of a static state: where each row's next token goes, int64 [R], and a step that ran without the host.
        self._positions = torch.zeros(layout.rows if layout.static else 0, dtype=torch.int64, device=layout.device)
        self._left: Left | None = None

    # ---- what it holds

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [len(row.tokens) for row in self._rows]

    @property
    def pending(self) -> list[int]:
        """Tokens of each row that await a verdict."""
        self._adopt()
        return list(self._pending.step.counts) if self._pending else [0] * self.rows

    def tokens(self, row: int) -> list[int]:
        """The ids of a row's committed tokens."""
        return list(self._row(row).tokens)

    def kept(self, row: int, layer: int) -> list[list[int]]:
        """For each kv head of an attention layer, the positions of a row whose keys and values it still has in sight.

        Tokens that wait to be computed (after a rewind far back, say) are not among them. Raises `UnsupportedError` for
        a layer that keeps no positions apart.
        """
        own = self._row(row)
        if not 0 <= layer < len(self.layers):
            raise StateError(f"layer {layer} was asked for; the state has the layers 0 to {len(self.layers) - 1}")
        return self.layers[layer].kept(row, own.cached)

    def memory(self) -> dict[str, int]:
        """Bytes held now, by layer kind; `logits`, `marks` and `positions` beside them where there are any."""
        self._adopt()
        held: dict[str, int] = {"positions": self._positions.nbytes} if self.layout.static else {}
        for layer in self.layers:
            for part in layer.parts():
                held[part.kind] = held.get(part.kind, 0) + part.nbytes()
        logits = {row.logits.data_ptr(): row.logits.nbytes for row in self._rows if row.logits is not None}
        if self._pending is not None and self._pending.logits is not None:
            logits[self._pending.logits.data_ptr()] = self._pending.logits.nbytes
        marks = {t.data_ptr(): t.nbytes for row in self._rows for mark in row.marks for t in mark.tensors()}
        marks = {pointer: size for pointer, size in marks.items() if pointer not in logits}
        for name, sizes in (("logits", logits), ("marks", marks)):
            if sizes:
                held[name] = sum(sizes.values())
        return held

    # ---- the transaction, for the model that runs it

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
                row.logits = last[index].clone()
        self._pending = None
        self._publish()

    def ran(self, logits: Tensor | None) -> None:
        """The pending step's forward is done; its logits are `[R, T, V]`, or `[R, V]` of the last tokens."""
        assert self._pending is not None
        self._pending = Pending(self._pending.step, self._pending.ids, logits)

    def device_step(self, width: int, counts: Tensor | None = None) -> tuple[DeviceStep, Tensor]:
        """A step of `width` tokens a row, planned without a look at the host; and which rows take part, bool `[R]`.

        `counts` int64 `[R]`: how many of them are real; None: all. A row that has no room for them, or whose layers
        miss some of its tokens, takes no part: nothing of it is written, and `commit` says why. Only a static state has
        such steps. `left` is what makes the tokens pending.
        """
        if not self.layout.static or self.layout.capacity is None:
            raise UnsupportedError("a step from device tensors needs a state made with new_state(..., static=True)")
        if self._left is not None or self._pending is not None:
            raise PendingError("cannot take more tokens: there are pending ones; call commit or discard first")
        if width > min(self.layout.chunk, self.layout.capacity):
            raise CapacityError(
                f"a step of {width} tokens was asked for; this state takes at most "
                f"{min(self.layout.chunk, self.layout.capacity)} at a time: feed them in parts"
            )
        if counts is None:
            counts = torch.full_like(self._positions, width)
        room = self._positions + counts <= self.layout.capacity
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
                row.logits = _logits_at(pending.logits, index, n, step.counts[index])
        self._pending = None
        self._publish()

    def discard(self) -> None:
        """The pending tokens never happened. Harmless if nothing is pending."""
        self._adopt()
        if self._pending is not None:
            self._pending = None
            for layer in self.layers:
                layer.discard()

    # ---- moving about

    def queue(self, row: int, ids: Sequence[int]) -> None:
        """Append tokens that count as seen now and are computed at the start of the next call."""
        self._refuse_pending("queue tokens", row)
        own = self._row(row)
        if ids:
            self._fits([len(ids) if i == row else 0 for i in range(self.rows)])
            own.tokens += list(ids)
            own.logits = None
            self._publish()

    def rewind(self, row: int, to: int) -> None:
        """Take a row back to its first `to` tokens, exactly. `rewind_cost` tells what the next call recomputes.

        Other rows may have pending tokens, this one may not. Raises `RewindError` if the row never was at `to`.
        """
        own = self._rewindable(row, to)
        if to == len(own.tokens):
            return
        known = next((mark.logits for mark in own.marks if mark.at == to), None)
        self._forget(row, to)
        del own.tokens[to:]
        own.marks = [mark for mark in own.marks if mark.at <= to]
        own.logits = known
        self._publish()

    def rewind_cost(self, row: int, to: int) -> int:
        """How many tokens the next call recomputes after `rewind(row, to)`: 0 inside the rewind window."""
        self._rewindable(row, to)
        base, _ = self._base(row, to)
        return to - base

    def mark(self, row: int) -> None:
        """Keep a checkpoint of a row here, to rewind to later. A row keeps the last 8.

        Queued tokens are not part of it: a rewind to here computes them, as the next call would.
        """
        self._refuse_pending("mark", row)
        own = self._row(row)
        layers = {i: layer.capture(row, own.cached) for i, layer in enumerate(self.layers) if layer.forgets}
        logits = own.logits if own.cached == len(own.tokens) else None
        others = [mark for mark in own.marks if mark.at != own.cached]
        own.marks = [*others, Mark(own.cached, layers, logits)][-MARKS:]

    def select(self, rows: Sequence[int | None]) -> None:
        """Make a new batch: row i is a copy of the old row `rows[i]`, or empty for None. Rows not named are dropped."""
        self._refuse_pending("select")
        known = [Row() if row is None else self._row(row).fork() for row in rows]
        if not known:
            raise StateError("select was given no rows; a state has at least one")
        if self.layout.static and len(known) != self.rows:
            raise UnsupportedError(
                f"select was given {len(known)} rows; a static state keeps the {self.rows} that it was made with: "
                "name as many, None for empty ones, or make another state"
            )
        self._install([layer.select(rows) for layer in self.layers])
        self._rows = known
        self._publish()

    def snapshot(self, row: int = 0) -> Snapshot:
        """A copy of one row, of every layer, with its token ids and last logits."""
        self._refuse_pending("snapshot", row)
        own = self._row(row)
        layers = tuple(layer.capture(row, own.cached) if own.cached else {} for layer in self.layers)
        logits = None if own.logits is None else own.logits.clone()
        return Snapshot(tuple(own.tokens), own.cached, own.regime, logits, layers, self._fingerprint())

    def drop(self, row: int, start: int, stop: int) -> None:
        """Forget the tokens `start .. stop - 1` of a row and close the gap: later keys turn to their new positions.

        What later tokens read from the forgotten ones stays in their values, as everywhere where spans are dropped; the
        last logits stay too. Raises `UnsupportedError` if a layer cannot do it exactly, `RewindError` for a bad span.
        """
        self._refuse_pending("drop a span")
        own = self._row(row)
        if not 0 <= start <= stop <= len(own.tokens):
            raise RewindError(
                f"drop of {start} to {stop} was asked for; row {row} has positions 0 to {len(own.tokens)}"
            )
        refusals = [
            f"layer {index} ({layer.kind}): {why}"
            for index, layer in enumerate(self.layers)
            if (why := layer.refuses_drop(row)) is not None
        ]
        if refusals:
            shown = "; ".join(refusals[:3]) + ("; ..." if len(refusals) > 3 else "")
            raise UnsupportedError(f"a span of row {row} cannot be dropped: {shown}. Rewind, or feed the shorter text")
        first, last = min(start, own.cached), min(stop, own.cached)
        if first < last:
            self._install([layer.drop(row, own.cached, first, last) for layer in self.layers])
        own.cached -= last - first
        del own.tokens[start:stop]
        own.marks = [mark for mark in own.marks if mark.at <= start]
        self._publish()

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Put a snapshot in a row, whose own content is lost. The snapshot is checked whole before anything moves."""
        self._refuse_pending("restore", row)
        own = self._row(row)
        if differences := _differences(snapshot.fingerprint, self._fingerprint()):
            raise SnapshotError(f"the snapshot is of another model: {differences}; restore it where it came from")
        if len(snapshot.layers) != len(self.layers):
            raise SnapshotError(f"the snapshot has {len(snapshot.layers)} layers; this state has {len(self.layers)}")
        if self.layout.capacity is not None and snapshot.length > self.layout.capacity:
            raise CapacityError(
                f"the snapshot has {snapshot.length} tokens; this state was made with capacity={self.layout.capacity}"
            )
        width = self._vocab_size or 2**31
        if snapshot.tokens and max(snapshot.tokens) >= width:
            raise SnapshotError(
                f"the snapshot has the token id {max(snapshot.tokens)}; this model's end at {width - 1}"
            )
        if snapshot.logits is not None and len(snapshot.logits) != (self._vocab_size or len(snapshot.logits)):
            raise SnapshotError(f"the snapshot has {len(snapshot.logits)} logits; this model gives {width}")
        self._install([layer.restore(row, snapshot.cached, kept) for layer, kept in zip(self.layers, snapshot.layers)])
        logits = None if snapshot.logits is None else snapshot.logits.to(self.layout.device, torch.float32)
        own.tokens, own.cached, own.logits, own.marks = list(snapshot.tokens), snapshot.cached, logits, []
        own.regime = snapshot.regime
        self._publish()

    # ---- the parts of it

    def _row(self, row: int) -> Row:
        if not 0 <= row < self.rows:
            raise StateError(f"row {row} was asked for; the state has the rows 0 to {self.rows - 1}")
        return self._rows[row]

    def _refuse_pending(self, what: str, row: int | None = None) -> None:
        pending = self.pending
        if self._pending is not None and (row is None or (self._row(row) and pending[row])):
            raise PendingError(f"cannot {what}: the rows have {pending} pending tokens; call commit or discard first")

    def _rewindable(self, row: int, to: int) -> Row:
        self._refuse_pending("rewind", row)
        own = self._row(row)
        if not 0 <= to <= len(own.tokens):
            raise RewindError(f"rewind of row {row} to {to} was asked for; it has the positions 0 to {len(own.tokens)}")
        return own

    def _fits(self, counts: Sequence[int]) -> None:
        capacity = self.layout.capacity
        for index, (row, count) in enumerate(zip(self._rows, counts)):
            if capacity is not None and len(row.tokens) + count > capacity:
                raise CapacityError(
                    f"row {index} holds {len(row.tokens)} tokens and was given {count} more; the state was made with "
                    f"capacity={capacity}: rewind or drop tokens, or make a larger state"
                )

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
            if (late := len(row.tokens) - row.cached) and count:
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

    def _base(self, row: int, to: int) -> tuple[int, Mark | None]:
        """The last position at or before `to` that needs no token computed, and the mark that holds it, if one does."""
        own = self._row(row)
        if to >= own.cached:
            return own.cached, None
        if to >= max((layer.reach(row, own.cached) for layer in self.layers), default=0):
            return to, None
        marks = [mark for mark in own.marks if mark.at <= to]
        return (marks[-1].at, marks[-1]) if marks else (0, None)

    def _forget(self, row: int, to: int) -> None:
        """Take the layers of a row back to `to`, or as little before it as can be. Its tokens stay."""
        own = self._row(row)
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


def _differences(theirs: str, ours: str) -> str:
    """What two fingerprints disagree on, in words; empty if nothing."""
    if theirs == ours:
        return ""
    there, here = (dict(word.partition("=")[::2] for word in text.split()) for text in (theirs, ours))
    named = [name for name in here if there.get(name) != here[name]]
    said = [f"{name} is {there.get(name, 'unknown')[:40]} there and {here[name][:40]} here" for name in named]
    return ", ".join(said) or "its fingerprint cannot be read"


def _logits_at(logits: Tensor | None, row: int, accepted: int, count: int) -> Tensor | None:
    """The logits after a row's last accepted token, if the forward computed them."""
    if logits is None:
        return None
    if logits.ndim == 3:
        return logits[row, accepted - 1].clone()
    return logits[row].clone() if accepted == count else None
