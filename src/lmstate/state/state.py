"""The inference state of a batch of sequences: the only thing that knows a position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lmstate.errors import CapacityError, RewindError, SnapshotError, StateError, UnsupportedError
from lmstate.state.rows import Mark, Row
from lmstate.state.snapshot import Snapshot, differences
from lmstate.state.transaction import Transaction
from lmstate.state.validate import token_ids, whole_number

MARKS = 8  # checkpoints that a row keeps; the oldest goes first


class State(Transaction):
    """Everything that a model remembers of `rows` sequences. Made by `model.new_state`.

    A step is planned, run by the model, and then committed, in part or not at all; only a commit moves a length. Every
    method either does all of what it says or raises a `StateError` and changes nothing.
    """

    # ---- what it holds

    def __repr__(self) -> str:
        """Lengths, pending tokens, layers and bytes; changes nothing, not even a device step that awaits the host."""
        kinds = Counter(layer.kind for layer in self.layers)
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        held = sum(layer.nbytes() for layer in self.layers)
        pending = "" if self._pending is None else f", pending {list(self._pending.step.counts)}"
        return f"State({self.rows} rows of lengths {self.lengths}{pending}; layers: {layers}; {held / 2**20:,.1f} MiB)"

    def tokens(self, row: int) -> list[int]:
        """The ids of a row's committed tokens."""
        _, own = self._row(row)
        return list(own.tokens)

    def kept(self, row: int, layer: int) -> list[list[int]]:
        """For each kv head of an attention layer, the positions of a row whose keys and values it still has in sight.

        Tokens that wait to be computed (after a rewind far back, say) are not among them. Raises `UnsupportedError` for
        a layer that keeps no positions apart.
        """
        row, own = self._row(row)
        layer = whole_number(layer, "a layer")
        if not 0 <= layer < len(self.layers):
            raise StateError(f"layer {layer} was asked for; the state has the layers 0 to {len(self.layers) - 1}")
        return self.layers[layer].kept(row, own.cached)

    def memory(self) -> dict[str, int]:
        """Bytes held now, by layer kind; `logits`, `marks` and `positions` beside them where there are any."""
        self._adopt()
        held: dict[str, int] = {"positions": self._positions.nbytes} if self.layout.static else {}
        for layer in self.layers:
            for part in layer.leaves():
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

    # ---- moving about

    def queue(self, row: int, ids: Sequence[int]) -> None:
        """Append tokens that count as seen now and are computed at the start of the next call."""
        row, own = self._row(row)
        self._refuse_pending("queue tokens", row)
        if ids := token_ids(ids, f"row {row}", self._vocab_size):
            self._fits([len(ids) if i == row else 0 for i in range(self.rows)])
            own.tokens += ids
            own.logits = None
            self._publish()

    def rewind(self, row: int, to: int) -> None:
        """Take a row back to its first `to` tokens, exactly. `rewind_cost` tells what the next call recomputes.

        Other rows may have pending tokens, this one may not. Raises `RewindError` if the row never was at `to`.
        """
        row, to, own = self._rewindable(row, to)
        if to == len(own.tokens):
            return
        known = next((mark.logits for mark in own.marks if mark.at == to), None)
        self._forget(row, to)
        del own.tokens[to:]
        own.marks = [mark for mark in own.marks if mark.at <= to]
        own.logits = known
        self._publish()

    def rewind_cost(self, row: int, to: int) -> int:
        """How many tokens the next call recomputes after `rewind(row, to)`: 0 inside the rewind window.

        That is a call with one new token. One with more may take the row past the length where its rope changes, and
        then computes it from the start.
        """
        row, to, own = self._rewindable(row, to)
        base, _ = self._base(row, to)
        return to - base if own.regime == self._regime(to + 1) else to

    def mark(self, row: int) -> None:
        """Keep a checkpoint of a row here, to rewind to later. A row keeps the last 8.

        Queued tokens are not part of it: a rewind to here computes them, as the next call would.
        """
        row, own = self._row(row)
        self._refuse_pending("mark", row)
        layers = {i: layer.capture(row, own.cached) for i, layer in enumerate(self.layers) if layer.lossy}
        logits = own.logits if own.cached == len(own.tokens) else None
        others = [mark for mark in own.marks if mark.at != own.cached]
        own.marks = [*others, Mark(own.cached, own.regime, layers, logits)][-MARKS:]

    def select(self, rows: Sequence[int | None]) -> None:
        """Make a new batch: row i is a copy of the old row `rows[i]`, or empty for None. Rows not named are dropped."""
        self._refuse_pending("select")
        sources = [None if row is None else self._row(row)[0] for row in rows]
        if not sources:
            raise StateError("select was given no rows; a state has at least one")
        if self.layout.static and len(sources) != self.rows:
            raise UnsupportedError(
                f"select was given {len(sources)} rows; a static state keeps the {self.rows} that it was made with: "
                "name as many, None for empty ones, or make another state"
            )
        self._install([layer.select(sources) for layer in self.layers])
        self._rows = [Row() if row is None else self._rows[row].fork() for row in sources]
        self._publish()

    def snapshot(self, row: int = 0) -> Snapshot:
        """A copy of one row, of every layer, with its token ids and last logits."""
        row, own = self._row(row)
        self._refuse_pending("snapshot", row)
        layers = tuple(layer.capture(row, own.cached) if own.cached else {} for layer in self.layers)
        logits = None if own.logits is None else own.logits.clone()
        return Snapshot(tuple(own.tokens), own.cached, own.regime, logits, layers, self.fingerprint)

    def drop(self, row: int, start: int, stop: int) -> None:
        """Forget the tokens `start .. stop - 1` of a row and close the gap: later keys turn to their new positions.

        What later tokens read from the forgotten ones stays in their values, as everywhere where spans are dropped; the
        last logits stay too. Raises `UnsupportedError` if a layer cannot do it exactly, `RewindError` for a bad span.
        """
        row, own = self._row(row)
        start, stop = whole_number(start, "the start of a span"), whole_number(stop, "the end of a span")
        self._refuse_pending("drop a span")
        if not 0 <= start <= stop <= len(own.tokens):
            raise RewindError(
                f"drop of {start} to {stop} was asked for; row {row} has positions 0 to {len(own.tokens)}"
            )
        if self.layout.max_positions is not None:
            raise UnsupportedError(
                f"a span of row {row} cannot be dropped: the model has learned each position by itself, and what it "
                "made of the later tokens is of the positions where they were. Rewind, or feed the shorter text"
            )
        if own.cached and own.regime != self._regime(0):
            raise UnsupportedError(
                f"a span of row {row} cannot be dropped: its keys are rotated for a text that has outgrown the model's "
                "rope, and layers move them as in a short one. Rewind, or feed the shorter text"
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
        row, _ = self._row(row)
        self._refuse_pending("restore", row)
        if not isinstance(snapshot, Snapshot):
            raise SnapshotError(
                f"restore was given {snapshot!r:.80}; it takes what state.snapshot or Snapshot.load gave"
            )
        if different := differences(snapshot.fingerprint, self.fingerprint):
            raise SnapshotError(f"the snapshot is of another model: {different}; restore it where it came from")
        restored = snapshot.as_row(self._vocab_size, self.layout.device)
        if len(snapshot.layers) != len(self.layers):
            raise SnapshotError(f"the snapshot has {len(snapshot.layers)} layers; this state has {len(self.layers)}")
        if self.layout.capacity is not None and len(restored.tokens) > self.layout.capacity:
            raise CapacityError(
                f"the snapshot has {snapshot.length} tokens; this state was made with capacity={self.layout.capacity}"
            )
        self._install([layer.restore(row, restored.cached, kept) for layer, kept in zip(self.layers, snapshot.layers)])
        self._rows[row] = restored
        self._publish()

    def _rewindable(self, row: int, to: int) -> tuple[int, int, Row]:
        """Row and position as plain ints, and what is known of the row."""
        row, own = self._row(row)
        to = whole_number(to, "a position")
        self._refuse_pending("rewind", row)
        if not 0 <= to <= len(own.tokens):
            raise RewindError(f"rewind of row {row} to {to} was asked for; it has the positions 0 to {len(own.tokens)}")
        return row, to, own
