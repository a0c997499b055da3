"""The transaction of a state: a step is planned, run by the model, pending, then committed or discarded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lmstate.errors import CapacityError, PendingError, StateError
from lmstate.state.changes import Changes
from lmstate.state.device import DeviceResult
from lmstate.state.held import HeldRows
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.state.media import Spans, before_picture
from lmstate.state.memory import Memory, memory_by_kind, nbytes_beside
from lmstate.state.pending import Pending
from lmstate.state.rewind import lost_embeddings, nearest_mark, rewind_layers
from lmstate.state.rows import Row
from lmstate.state.step import DeviceStep, Step, as_counts


class SteppedRows(HeldRows):
    """Rows that steps extend. `lmstate.State` says what holds for all of its methods."""

    # ---- content

    @property
    def pending(self) -> list[int]:
        """Tokens of each row that await a verdict."""
        self._read_device_step()
        if self._tree is not None:
            return list(self._tree.counts)
        ready = self._pending is not None and self._pending.ready
        return list(self._pending.step.counts) if self._pending and ready else [0] * self.rows

    def __repr__(self) -> str:
        """Lengths, pending tokens, layers and bytes; changes nothing, not even a device step that awaits the host."""
        kinds = Counter(layer.kind for layer in self.layers)
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        held = sum(layer.nbytes() for layer in self.layers)
        pending = (
            "" if self._pending is None or not self._pending.ready else f", pending {list(self._pending.step.counts)}"
        )
        return f"State({self.rows} rows of lengths {self.lengths}{pending}; layers: {layers}; {held / 2**20:,.1f} MiB)"

    def memory(self) -> Memory:
        """Bytes held now, by layer kind; `logits`, `marks`, `media`, `positions`, `tree` beside them, if there are any.

        A block counts once, however many rows hold it; `shared` of the result says how many bytes are in blocks that
        others may hold as well.
        """
        self._read_device_step()
        positions = self._device.positions.nbytes if self.layout.static else 0
        held = memory_by_kind(self.layers, self._rows, self._logits_held(), positions)
        if (tree := self._tree) is not None:
            held["tree"] = nbytes_beside(tree.state.layers, tree.state._rows, self.layers, self._rows)
            if (pending := tree.state._pending) is not None and pending.logits is not None:
                held["tree"] += pending.logits.nbytes
        return held

    # ---- a step, for the model that runs it

    def backlog(self, counts: Sequence[int], *, logits: bool) -> list[list[int]]:
        """The committed tokens that the layers must see (again) before a step of `counts` new tokens can run.

        With `logits`, an idle row whose last logits are unknown reads its last token again. Raises `PendingError` or
        `CapacityError` if the step cannot be.
        """
        self._refuse_pending("take more tokens")
        if len(counts) != self.rows:
            raise StateError(f"{len(counts)} rows of tokens were given to a state of {self.rows}; idle rows are []")
        self._check_capacity(counts)
        aims = []  # of each row: its frequency key, and where it is computed from; an error leaves all as they are
        for index, (row, length, count) in enumerate(zip(self._rows, self._rope_lengths(counts), counts)):
            key = self._frequency_key(length)
            to = 0 if row.cached and key != row.frequency_key else row.cached
            if logits and not count and row.logits is None and row.cached == row.length > self._ahead:
                to = min(to, before_picture(row.media, row.length - 1) if self.whole_pictures else row.length - 1)
            base, _ = nearest_mark(self.layers, index, row, to)
            if (gone := lost_embeddings(row._replace(cached=base), row.length, self._ahead)) is not None:
                raise StateError(f"row {index} is to be {gone}")
            aims.append((key, to))
        for index, (row, (key, to)) in enumerate(zip(self._rows, aims)):
            # Each row in a change of its own: the next one starts from the tensors that this one leaves.
            changes = Changes()
            new = rewind_layers(self.layers, index, row, to, changes)
            new = new if new.cached or new.frequency_key == key else new._replace(frequency_key=key)
            if new is not row:
                self._apply(changes, self._with(index, new))
        return [row.backlog if count or self._length(row) else [] for row, count in zip(self._rows, counts)]

    def plan_backlog(self, ids: list[list[int]], counts: Sequence[int]) -> Step:
        """Reserve room for the backlog; `commit_backlog` makes it real. `counts`: the new tokens that come after it."""
        return self._reserve(ids, False, self._rope_lengths(counts))

    def commit_backlog(self, last: Tensor | None) -> None:
        """The layers have seen the backlog; `last` float32 `[R, V]` are the logits after it."""
        assert self._pending is not None
        step, changes, rows = self._pending.step, Changes(), []
        for layer in self.layers:
            layer.commit(step.on(layer.device), step.counts, changes)
        for index, (row, count) in enumerate(zip(self._rows, step.counts)):
            row = row._replace(cached=row.cached + count)
            if count and last is not None:
                row = row._replace(logits=self._logits_if_valid(row, last[index]))
            rows.append(row)
        self._apply(changes, rows, ends_step=True)

    def plan(self, ids: Sequence[Sequence[int]], *, speculative: bool = False, rewindable: Sequence[bool] = ()) -> Step:
        """Reserve room for new tokens in every layer, or in none; `record_logits` makes the step pending."""
        counts = tuple(map(len, ids))
        behind = (row for row, count in zip(self._rows, counts) if count or self._length(row))
        assert all(row.cached == row.length for row in behind), "plan before the backlog was computed"
        for index, (row, new) in enumerate(zip(self._rows, ids)):
            self._check_media(index, row, new)
            if (cut := self._parted(row, row.length + len(new))) is not None:
                stop = self._length(row) + len(new)
                raise StateError(f"row {index} was given {len(new)} tokens, up to {stop}, {cut}")
        partly = None if all(rewindable) else tuple(rewindable)
        return self._reserve([list(row) for row in ids], speculative, self._rope_lengths(counts), partly)

    @property
    def planned(self) -> Pending:
        """The step that was planned, for what runs it."""
        assert self._pending is not None, "nothing was planned"
        return self._pending

    def record_logits(
        self, logits: Tensor | None, kept: Sequence[int] | None = None, ids: list[list[int]] | None = None
    ) -> None:
        """The planned step's forward is done; its logits are `[R, T, V]`, `[R, V]` of the last tokens, or `[R, K, V]`
        of the last `kept[r]` of each row. ids: its tokens, where the forward chose them."""
        assert self._pending is not None
        ids = self._pending.ids if ids is None else ids
        self._pending = Pending(self._pending.step, ids, logits, kept, ready=True)

    def last_logits(self) -> list[Tensor | None]:
        """Of each row: float32 `[V]` after its last committed token, where known."""
        return [row.logits for row in self._rows]

    def device_step(self, width: int, counts: Tensor | None = None) -> tuple[DeviceStep, Tensor]:
        """A step of `width` tokens a row, planned without a look at the host; and which rows take part, bool `[R]`.

        `counts` int64 `[R]`: how many of them are real; None: all. A row that has no room for them, or whose layers
        miss some of its tokens, or whose count is not in 0 to `width`, takes no part: nothing of it is written, and
        `commit` says why. Only a static state has such steps. `record_device_step` makes the tokens pending.
        """
        if self._device.result is not None or (self._pending is not None and self._pending.waits):
            raise PendingError("cannot take more tokens: there are pending ones; call commit or discard first")
        planned = self._device.plan(width, counts)
        self.discard()
        return planned

    def record_device_step(self, tokens: Tensor, counts: Tensor | None, logits: Tensor) -> None:
        """A device step ran over `tokens` int64 `[R, T]`: they are pending."""
        self._device.result = DeviceResult(tokens, counts, logits)

    def in_layers(self) -> tuple[list[int], tuple[Spans, ...]]:
        """Length and pictures of each row as its layers count: after what was learned in front of it."""
        return [row.length for row in self._rows], tuple(map(self._behind, self._rows))

    def static_tensors(self) -> list[Tensor]:
        """Of a static state, all that a device step reads and changes: these tensors never move."""
        return [self._device.positions, *(t for layer in self.layers for t in layer.static_tensors().values())]

    def step_room(self, row: int, most: int) -> int:
        """Number of the `most` new tokens that one step may bring to a row and compute each as if it came alone.

        The rest does not fit, or the frequencies of its rope change on the way, or a policy evicts after each step.
        """
        _, own = self._row(row)
        held = own.length
        limits = (self.layout.capacity, self.layout.max_positions)
        room = max(0, min([most, *(limit - held for limit in limits if limit is not None)]))
        if self.evicts:
            return min(room, 1)
        while room > 1 and self._frequency_key(held + room) != self._frequency_key(held + 1):
            room -= 1
        return room

    # ---- the verdict

    @ordinary_tensors
    def commit(self, counts: int | Sequence[int] | None = None) -> None:
        """Make the first `counts[r]` pending tokens of each row real: all by default, a number for each row with any.

        The rest never happened. A step of no tokens needs no commit, and takes one until the next step, `select` or
        `drop`. Raises `PendingError` if nothing is pending or a count is more than is pending.
        """
        self._read_device_step()
        if self._tree is not None:
            raise PendingError("commit was asked for, but a tree is pending; call commit_path or discard")
        pending = self._pending
        if pending is None or not pending.ready:
            self.discard()
            raise PendingError("commit was asked for, but nothing is pending; call the model with commit=False first")
        if pending.refused is not None:
            self.discard()
            raise pending.refused
        step = pending.step
        accepted = as_counts(counts, step.counts)
        if accepted is None:
            raise PendingError(f"commit({counts}) does not fit: the pending tokens of the rows are {list(step.counts)}")
        for index, (row, n) in enumerate(zip(self._rows, accepted)):
            if (cut := self._parted(row, row.length + n)) is not None:
                raise PendingError(f"commit({counts}) would end row {index} at {row.length + n}, {cut}")
        if not any(accepted):
            self.discard()
            return
        changes, rows = Changes(), []
        for layer in self.layers:
            layer.commit(step.on(layer.device), accepted, changes)
        for index, (row, ids, n) in enumerate(zip(self._rows, pending.ids, accepted)):
            if n:
                row = row.extended(ids[:n])
                logits = self._logits_if_valid(row, pending.logits_at(index, n))
                row = row._replace(cached=row.cached + n, logits=logits)
            rows.append(row)
        self._apply(changes, rows, ends_step=True)

    def discard(self) -> None:
        """The pending tokens never happened. Harmless if nothing is pending."""
        self._read_device_step()
        self._tree = None
        if self._pending is not None:
            self._pending = replace(self._pending, ready=False)  # whatever interrupts the rest of it
            for layer in self.layers:
                layer.discard()
            self._pending = None

    # ---- the parts of it

    def _refuse_pending(self, what: str, row: int | None = None) -> None:
        pending = self.pending
        tree = self._tree is not None and self._tree.waits
        waits = tree or (self._pending is not None and self._pending.waits)
        if waits and (row is None or pending[row] or tree):
            raise PendingError(f"cannot {what}: the rows have {pending} pending tokens; call commit or discard first")
        planned = self._pending is not None and not self._pending.ready
        if not waits and (row is None or planned or self._tree is not None):
            self.discard()  # beside one row that moves, a step of no tokens stays as one of other rows' tokens does

    def _reserve(
        self,
        ids: list[list[int]],
        speculative: bool,
        rope_lengths: tuple[int, ...],
        rewindable: tuple[bool, ...] | None = None,
    ) -> Step:
        counts = tuple(map(len, ids))
        starts = tuple(row.cached for row in self._rows)
        media = tuple(row.media if row.cached < self._ahead else self._behind(row) for row in self._rows)
        media = media if any(media) else ()
        step = Step(
            starts, counts, self.layout.device, rope_lengths, speculative, self.layout.chunk, rewindable, media,
            self.whole_pictures,
        )  # fmt: skip
        self._pending = Pending(step, ids)
        try:
            for layer in self.layers:
                layer.reserve(step.on(layer.device))
        except BaseException:
            self.discard()
            raise
        return step

    def _behind(self, row: Row) -> Spans:
        """The pictures of a row after what was learned in front."""
        return row.media[bool(self._ahead) :]

    def _read_device_step(self) -> None:
        """If a device step has run, make it the pending step: the one place where the host waits for its tokens."""
        if (result := self._device.result) is None:
            return
        tokens, wanted = result.read()
        counts, refused = list(wanted), None
        for index, (row, count) in enumerate(zip(self._rows, wanted)):
            if not 0 <= count <= len(tokens[index]):
                refused = StateError(
                    f"{count} tokens of row {index} were said to be real, in a step of {len(tokens[index])}: give "
                    f"counts from 0 to {len(tokens[index])}"
                )
            elif (late := row.length - row.cached) and count:
                refused = StateError(
                    f"{late} tokens of row {index} are still to be computed, and a device step cannot do it: run "
                    "model([[]] * rows, state) first"
                )
            else:
                try:
                    self._check_capacity([count if i == index else 0 for i in range(self.rows)])
                    continue
                except CapacityError as error:
                    refused = error
            counts[index] = 0
        starts = tuple(row.cached for row in self._rows)
        ends = tuple(start + count for start, count in zip(starts, counts))
        step = Step(starts, tuple(counts), self.layout.device, ends, True, self.layout.chunk)
        for layer in self.layers:
            layer.adopt_device_step(step)
        ids = [row[:n] for row, n in zip(tokens, counts)]
        changes = Changes()
        changes.assign(self, "_pending", Pending(step, ids, result.logits, None, refused, ready=True))
        changes.assign(self._device, "result", None)
        changes.apply()
