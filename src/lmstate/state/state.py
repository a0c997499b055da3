"""The inference state of a batch of sequences: the only thing that knows a position."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from lmstate.errors import (
    CapacityError,
    EmbeddingsGone,
    PendingError,
    RewindError,
    SnapshotError,
    StateError,
    UnsupportedError,
)
from lmstate.state.changes import Changes
from lmstate.state.drop import closed, refuses_drop
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.state.layers.slots import SlotState
from lmstate.state.media import Media, MediaSpan, before_picture, refusal, within
from lmstate.state.rewind import lost_embeddings, nearest_mark, rewind_layers
from lmstate.state.rows import Mark, Row
from lmstate.state.snapshot import Snapshot, differences
from lmstate.state.sources import Source, SourceFeatures
from lmstate.state.stepping import SteppedRows
from lmstate.state.tree import PendingTree
from lmstate.state.validate import token_ids, whole_number

MARKS = 8  # checkpoints that a row keeps; the oldest goes first


class State(SteppedRows):
    """Everything that a model remembers of `rows` sequences. Made by `model.new_state`.

    A step is planned (every layer reserves room, or none), run by the model, and then committed, in part or not at all;
    only a commit moves a length. Rows whose layers miss tokens (after a rewind far back, say) have a backlog, which a
    step of its own computes first. Every method either does all of what it says or raises a `StateError` and changes
    nothing: it computes first, and then applies its `Changes` at once, which no signal interrupts.
    """

    # ---- the verdict of a tree

    @ordinary_tensors
    def commit_path(self, paths: Sequence[Sequence[int]]) -> None:
        """Make one path of each row's pending tree real, and nothing else of it.

        paths: for each row the indices of nodes from the top down; an empty one accepts nothing. Raises `PendingError`
        if no tree is pending, or for a path that is not in it.
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
        forked = copy.deepcopy(tree.state)  # a fault on the way leaves the tree as it was
        forked.commit(counts)
        forked.select(chosen)
        changes = Changes()
        changes.assign(self, "layers", forked.layers)
        changes.assign(self, "_tree", None)
        self._apply(changes, [own if own.removed else new for own, new in zip(self._rows, forked._rows)])

    def record_tree(self, tree: PendingTree[State]) -> None:
        """A tree's forward is done: it is pending until `commit_path` or `discard`."""
        self._tree = tree

    # ---- moving about

    @ordinary_tensors
    def condition(self, row: int, source: Sequence[int] | SourceFeatures) -> None:
        """Have the tokens of a row read a source, which the model's encoder reads here, as one piece.

        source: the ids of a text, or what `Model.listen` makes of a sound. It comes before the row's first token, and
        stays through rewinds; forks and snapshots share what was encoded. `select` copies a conditioned row to others
        without encoding again. Raises `UnsupportedError` for a model without an encoder, `StateError` for a row that
        holds tokens, for an empty source and for one that this encoder does not read, `CapacityError` for a text longer
        than the model's positions.
        """
        row, own = self._row(row)
        if self._encode is None:
            raise UnsupportedError(
                f"condition({row}, ...) was asked for, and the model has no encoder: put the text in front of the "
                "row's tokens"
            )
        self._refuse_pending("condition", row)
        if length := self._length(own):
            raise StateError(
                f"condition({row}, ...) was asked for, and row {row} holds {length} tokens; a source comes before the "
                "first token: rewind the row to 0, or use another row"
            )
        if not isinstance(source, SourceFeatures):
            source = tuple(token_ids(source, "the source", self._ids))
            if not source:
                raise StateError(f"condition({row}, ...) was given an empty source; a source has at least one token")
        changes = Changes()
        for layer, tensors in zip(self.layers, self._encoded(row, source), strict=True):
            if layer.conditioned:
                layer.restore(row, 0, tensors, changes)
        kept = source.without_values() if isinstance(source, SourceFeatures) else source
        self._apply(changes, self._with(row, own._replace(source=kept, logits=None, marks=())))

    def _encoded(self, row: int, source: Source) -> Sequence[Mapping[str, Tensor]]:
        """The keys and values of a source for each layer, of which a row is about to get some."""
        assert self._encode is not None
        return self._encode(source)

    @ordinary_tensors
    def queue(self, row: int, ids: Sequence[int]) -> None:
        """Append tokens that count as seen now and are computed at the start of the next call."""
        row, own = self._row(row)
        self._refuse_pending("queue tokens", row)
        if ids := token_ids(ids, f"row {row}", self._ids):
            if (cut := self._parted(own, own.length + len(ids))) is not None:
                raise StateError(f"row {row} was to queue {len(ids)} tokens, up to {own.length + len(ids)}, {cut}")
            self._check_capacity([len(ids) if i == row else 0 for i in range(self.rows)])
            self._check_media(row, own, ids)
            self._apply(Changes(), self._with(row, own.extended(ids)._replace(logits=None)))

    @ordinary_tensors
    def place(self, row: int, at: int, media: Media) -> None:
        """Announce that a picture is in a row from position `at` on, which none of its tokens has reached yet.

        The next calls bring its tokens, `media.token` at each of its positions, whole or in parts, and read its
        embeddings instead of theirs. Until a rewind to `at` or before. One that already is there gets back the
        embeddings that were let go. Raises `StateError` where it cannot stand, `UnsupportedError` for a static state.
        """
        row, own = self._row(row)
        at = whole_number(at, "a position")
        self._refuse_pending("place a picture", row)
        where = f"a picture was to be placed in row {row} at {at}"
        if not isinstance(media, Media):
            raise StateError(f"{where}; {media!r:.80} is not a Media: make one with Media.of")
        if media.embeddings is None:
            raise EmbeddingsGone(f"{where}; its embeddings were let go: make it again")
        if (why := self._refuses_media(media)) is not None:
            raise UnsupportedError(f"{where}; {why}")
        before = self._shown(own)
        spans = tuple(span for span in before if span.at != at or span.media != media)
        if len(spans) == len(before) and at < self._length(own):
            raise StateError(f"{where}; the row has {self._length(own)} tokens: rewind to {at} first")
        spans = tuple(sorted((*spans, MediaSpan(at, media)), key=lambda span: span.at))
        if (why := refusal(spans, own.tokens[self._ahead :], *self._limits)) is not None:
            raise StateError(f"{where}; {why}")
        limits, end = (self.layout.capacity, self.layout.max_positions), self._ahead + at + media.count
        if end > min((limit for limit in limits if limit is not None), default=end):
            raise CapacityError(f"{where}; its {media.count} positions do not fit the state")
        whole = spans if self._opening is None else self._opening.before(Row.of()._replace(media=spans)).media
        self._apply(Changes(), self._with(row, own._replace(media=whole)))

    @ordinary_tensors
    def expect(self, row: int, length: int) -> None:
        """Announce that the text of a row will have `length` tokens, of which the next calls bring parts.

        Where frequencies depend on the length of the text, all parts are then rotated, and their logits are, as if one
        call brought the whole, and nothing is computed twice on the way. Until a rewind, or until the row is longer.
        """
        row, own = self._row(row)
        length = whole_number(length, "length")
        if length < 0:
            raise StateError(f"expect({row}, {length}) was asked for; a text has no fewer than 0 tokens")
        self._refuse_pending("expect tokens", row)
        length += self._ahead
        other = self._logits_key(own._replace(expected=length)) != self._logits_key(own)
        logits = None if other else own.logits
        self._apply(Changes(), self._with(row, own._replace(expected=length, logits=logits)))

    @ordinary_tensors
    def rewind(self, row: int, to: int) -> None:
        """Take a row back to its first `to` tokens, exactly. `rewind_cost` tells what the next call recomputes.

        Other rows may have pending tokens, this one may not. A picture that begins before `to` stays: inside it, the
        next tokens are the rest of it. Raises `RewindError` if the row never was at `to`, inside a picture that is
        computed as one piece, and where one would have to be read again whose embeddings were let go.
        """
        row, to, own = self._rewindable(row, to)
        media, asked = tuple(span for span in own.media if span.at < to), to - self._ahead
        if (cut := self._parted(own, to)) is not None:
            raise RewindError(f"rewind of row {row} to {asked} was asked for, {cut}")
        if to == own.length and media == own.media:
            return
        changes, marks = Changes(), tuple(mark for mark in own.marks if mark.at <= to)
        known = next((mark.logits for mark in marks if mark.at == to), None)
        back = rewind_layers(self.layers, row, own, to, changes)._replace(
            length=to, expected=0, logits=known, marks=marks, media=media
        )
        if (gone := lost_embeddings(back, to, self._ahead)) is not None:
            raise RewindError(
                f"rewind of row {row} to {asked} was asked for; it is {gone}, or rewind to "
                f"{self._computable(row, own, to) - self._ahead}"
            )
        self._apply(changes, self._with(row, back))

    def rewind_cost(self, row: int, to: int) -> int:
        """Number of tokens that the next call recomputes after `rewind(row, to)`: 0 inside the rewind window.

        That is a call with one new token. One with more may take the row past the length where its rope changes, and
        then computes it from the start.
        """
        row, to, own = self._rewindable(row, to)
        base, _ = nearest_mark(self.layers, row, own, to)
        expected = own.expected if to == own.length else 0  # a rewind ends what was expected
        base = base if own.frequency_key == self._frequency_key(max(to + 1, expected)) else 0
        return to - max(base, self._ahead)

    @ordinary_tensors
    def mark(self, row: int) -> None:
        """Keep a checkpoint of a row here, to rewind to later. A row keeps the last 8.

        Queued tokens are not part of it: a rewind to here computes them, as the next call would.
        """
        row, own = self._row(row)
        self._refuse_pending("mark", row)
        layers = {i: layer.capture(row, own.cached) for i, layer in enumerate(self.layers) if layer.lossy}
        logits = self._logits_of_its_length(own) if own.cached == own.length else None
        others = [mark for mark in own.marks if mark.at != own.cached]
        marks = (*others, Mark(own.cached, own.frequency_key, layers, logits))[-MARKS:]
        self._apply(Changes(), self._with(row, own._replace(marks=marks)))

    @ordinary_tensors
    def select(self, rows: Sequence[int | None]) -> None:
        """Make a new batch: row i is a copy of the old row `rows[i]`, or empty for None. Rows not named are dropped."""
        self._refuse_pending("select")
        if not isinstance(rows, Iterable):
            raise StateError(
                f"select was given {rows!r:.80}; it takes a list: for each row of the new batch one of this, or None"
            )
        sources = [None if row is None else self._row(row)[0] for row in rows]
        if not sources:
            raise StateError("select was given no rows; a state has at least one")
        if self.layout.static and len(sources) != self.rows:
            raise UnsupportedError(
                f"select was given {len(sources)} rows; a static state keeps the {self.rows} that it was made with: "
                "name as many, None for empty ones, or make another state"
            )
        changes = Changes()
        for layer in self.layers:
            layer.select(sources, changes)
        self._apply(changes, [self._empty() if row is None else self._rows[row].fork() for row in sources])

    @ordinary_tensors
    def add(self, snapshot: Snapshot | None = None) -> int:
        """Add a row, empty or from a snapshot, and return its number. Others keep theirs, and may have pending tokens.

        It takes the place of a row that was removed, if there is one. Raises `UnsupportedError` for a static state,
        which keeps its rows, `PendingError` beside a pending tree, and what `restore` raises.
        """
        if self._tree is not None:
            if self._tree.waits:
                raise PendingError("cannot add a row: a tree is pending; call commit_path or discard first")
            self.discard()
        free = next((i for i, own in enumerate(self._rows) if own.removed), None)
        if free is None and self.layout.static:
            raise UnsupportedError(
                f"a row was to be added; a static state keeps the {self.rows} that it was made with: make another state"
            )
        changes, new = Changes(), self._empty()
        captured: Sequence[Mapping[str, Tensor]] = [{}] * len(self.layers)
        if snapshot is not None:
            new, captured = self._checked(snapshot)
        for layer, tensors in zip(self.layers, captured):
            if free is None:
                layer.add_row(new.cached, tensors, changes)
            elif snapshot is not None:
                layer.restore(free, new.cached, tensors, changes)
        if free is not None:
            self._apply(changes, self._with(free, new))
            return free
        if (pending := self._pending) is not None:
            wider = replace(pending, step=pending.step.with_idle_row(), ids=[*pending.ids, []])
            changes.assign(self, "_pending", wider)
        self._apply(changes, [*self._rows, new])
        return self.rows - 1

    @ordinary_tensors
    def remove(self, row: int) -> None:
        """Empty a row and free its number for the next one that is added; the others keep theirs.

        Until then it is one more row that is given no tokens. Other rows may have pending tokens, this one may not.
        """
        row, _ = self._row(row)
        self._refuse_pending("remove", row)
        changes = Changes()
        for layer in self.layers:
            layer.restore(row, 0, {}, changes)
        self._apply(changes, self._with(row, self._empty()._replace(removed=True)))

    @ordinary_tensors
    def snapshot(self, row: int = 0) -> Snapshot:
        """One row as a value: every layer, token ids and last logits. It shares the blocks of the row."""
        row, own = self._row(row)
        self._refuse_pending("snapshot", row)
        layers = tuple(
            layer.capture(row, own.cached) if own.cached or layer.conditioned else {} for layer in self.layers
        )
        logits = self._logits_of_its_length(own)
        logits = None if logits is None else logits.clone()
        return Snapshot(
            tuple(own.tokens[self._ahead :]), own.cached, own.frequency_key, logits, layers, self.fingerprint,
            model=self._model_name, source=own.source, media=self._shown(own), opening=self._ahead,
        )  # fmt: skip

    @ordinary_tensors
    def drop(self, row: int, start: int, stop: int) -> None:
        """Forget the tokens `start .. stop - 1` of a row and close the gap, rotating later keys to their new positions.

        The influence of the forgotten tokens on later ones stays in the values of those, as everywhere where spans are
        dropped. The last logits stay too. Raises `UnsupportedError` if a layer cannot do it exactly, `RewindError` for
        a bad span.
        """
        row, start, stop, own = self._droppable(row, start, stop)
        if (why := self._refuses_drop(row, start, stop)) is not None:
            raise UnsupportedError(f"a span of row {row} cannot be dropped: {why}. Rewind, or feed the shorter text")
        first, last = min(start, own.cached), min(stop, own.cached)
        changes = Changes()
        if first < last:
            for layer in self.layers:
                layer.drop(row, own.cached, first, last, changes)
        self._apply(changes, self._with(row, closed(own, start, stop, last - first)))

    def can_drop(self, row: int, start: int, stop: int) -> bool:
        """Whether `drop(row, start, stop)` is possible: in all layers, or in none of them.

        Raises `RewindError` for a bad span, as `drop` does.
        """
        row, start, stop, _ = self._droppable(row, start, stop)
        return self._refuses_drop(row, start, stop) is None

    def in_blocks(self, slots: SlotState, start: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Stored tensors of one of its layers, of the positions from `start` on, in blocks as a snapshot has them.

        Raises `SnapshotError` for other tensors."""
        return slots.in_blocks(start, tensors)

    @ordinary_tensors
    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Put a snapshot in a row, whose own content is lost. The snapshot is checked whole before anything moves."""
        row, _ = self._row(row)
        self._refuse_pending("restore", row)
        new, captured = self._checked(snapshot)
        changes = Changes()
        for layer, tensors in zip(self.layers, captured):
            layer.restore(row, new.cached, tensors, changes)
        self._apply(changes, self._with(row, new))

    def _checked(self, snapshot: Snapshot) -> tuple[Row, Sequence[Mapping[str, Tensor]]]:
        """The row that a snapshot makes, and the content of each layer, which the layer checks."""
        if not isinstance(snapshot, Snapshot):
            raise SnapshotError(
                f"restore was given {snapshot!r:.80}; it takes what state.snapshot or Snapshot.load gave"
            )
        if different := differences(snapshot.fingerprint, self.fingerprint):
            raise SnapshotError(f"the snapshot is of another model: {different}; restore it where it came from")
        restored = snapshot.as_row(self._vocab_size, self._ids, self.layers[-1].device or self.layout.device)
        if len(snapshot.layers) != len(self.layers):
            raise SnapshotError(f"the snapshot has {len(snapshot.layers)} layers; this state has {len(self.layers)}")
        for span in restored.media:
            if (why := self._refuses_media(span.media)) is not None:
                raise UnsupportedError(f"the snapshot has a picture at {span.at}; {why}")
        why = refusal(restored.media, restored.tokens, *self._limits)
        if why is not None:
            raise SnapshotError(f"the snapshot is damaged, or of another model: {why}")
        if snapshot.opening != self._ahead:
            raise SnapshotError(
                f"the snapshot has {snapshot.opening} learned positions in front of its tokens, and this state "
                f"{self._ahead}"
            )
        if self._opening is not None:
            restored = self._opening.before(restored)
        if self.layout.capacity is not None and restored.length > self.layout.capacity:
            raise CapacityError(
                f"the snapshot has {snapshot.length} tokens; this state was made with "
                f"capacity={self.layout.capacity - self._ahead}"
            )
        sourced = [bool(captured) for layer, captured in zip(self.layers, snapshot.layers) if layer.conditioned]
        for position in (restored.cached, restored.length):
            if (cut := self._parted(restored, position)) is not None:
                raise SnapshotError(f"the snapshot is damaged, or of another model: it ends at {position}, {cut}")
        if set(sourced or [False]) != {restored.source is not None}:
            raise SnapshotError("the snapshot is damaged: it has a source without its keys and values, or the reverse")
        return restored, snapshot.layers

    # ---- the parts of it

    def _rewindable(self, row: int, to: int) -> tuple[int, int, Row]:
        """Row and position, the opening counted, as plain ints, and the record of the row."""
        row, own = self._row(row)
        to = whole_number(to, "a position")
        self._refuse_pending("rewind", row)
        length = self._length(own)
        if not 0 <= to <= length:
            raise RewindError(f"rewind of row {row} to {to} was asked for; it has the positions 0 to {length}")
        return row, self._ahead + to, own

    def _droppable(self, row: int, start: int, stop: int) -> tuple[int, int, int, Row]:
        """Row and span, the opening counted, as plain ints, and the record of the row."""
        row, own = self._row(row)
        start, stop = whole_number(start, "the start of a span"), whole_number(stop, "the end of a span")
        self._refuse_pending("drop a span")
        length = self._length(own)
        if not 0 <= start <= stop <= length:
            raise RewindError(f"drop of {start} to {stop} was asked for; row {row} has positions 0 to {length}")
        return row, self._ahead + start, self._ahead + stop, own

    def _refuses_drop(self, row: int, start: int, stop: int) -> str | None:
        own, short_key = self._rows[row], self._frequency_key(0)
        return refuses_drop(self.layers, self.layout, row, own, start, stop, short_key, self._ahead)

    def _computable(self, row: int, own: Row, to: int) -> int:
        """The last position before `to` to which a rewind needs no embeddings that were let go."""
        while to:
            base, _ = nearest_mark(self.layers, row, own, to)
            gone = [span.at for span in within(own.media, base, to) if span.media.embeddings is None]
            if not gone and self.whole_pictures and (whole := before_picture(own.media, to)) < to:
                to = whole
                continue
            if not gone:
                break
            to = min(gone[0], to - 1)
        return to
