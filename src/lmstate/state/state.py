"""The inference state of a batch of sequences: the only thing that knows a position."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

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
from lmstate.ops.types.block_table import KVBlock
from lmstate.state.changes import Changes
from lmstate.state.device import DeviceResult, DeviceSteps
from lmstate.state.drop import closed, refuses_drop
from lmstate.state.gradients import CopiedGraphs
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.state.layers.base import LayerState, Layout
from lmstate.state.layers.slots import SlotState
from lmstate.state.media import (
    Media,
    MediaSpan,
    before_picture,
    held_tensors,
    inside,
    misplaced,
    refusal,
    within,
)
from lmstate.state.memory import Memory, memory_by_kind, nbytes_beside
from lmstate.state.pending import Pending
from lmstate.state.rewind import nearest_mark, rewind_layers
from lmstate.state.rows import Mark, Row, check_room
from lmstate.state.snapshot import Snapshot, differences
from lmstate.state.sources import SourceFeatures
from lmstate.state.step import DeviceStep, Step, as_counts
from lmstate.state.tree import PendingTree
from lmstate.state.validate import token_ids, whole_number

MARKS = 8  # checkpoints that a row keeps; the oldest goes first


class State:
    """Everything that a model remembers of `rows` sequences. Made by `model.new_state`.

    A step is planned (every layer reserves room, or none), run by the model, and then committed, in part or not at all;
    only a commit moves a length. Rows whose layers miss tokens (after a rewind far back, say) have a backlog, which a
    step of its own computes first. Every method either does all of what it says or raises a `StateError` and changes
    nothing: it computes first, and then applies its `Changes` at once, which no signal interrupts.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        layout: Layout,
        *,
        vocab_size: int,
        fingerprint: Callable[[], str],
        model_name: str = "",
        user: Callable[[], object],
        encode: Callable[[Sequence[int] | SourceFeatures], Sequence[Mapping[str, Tensor]]] | None = None,
        frequency_key: Callable[[int], int],
        hidden_size: int,
        axes: bool = False,
        whole_pictures: bool = False,
    ):
        """`fingerprint()` names the model; it is asked for only by snapshots, and for a model that is not `user()`.
        `model_name` is the name of the model for people.

        `encode(source)` gives each layer the keys and values of a source; None for a model without an encoder.

        `frequency_key(length)` is for ropes whose frequencies depend on the length of the text: two lengths of one key
        rotate alike, and a row that passes from one key to another is computed again from its start. `axes`: whether
        positions may have several axes, as pictures say. `whole_pictures`: whether the tokens of a picture see all of
        it, so that no step ends inside one.
        """
        self.layers = list(layers)
        self.evicts = any(leaf.evicts for layer in self.layers for leaf in layer.leaves())
        self.conditioned = any(layer.conditioned for layer in self.layers)
        self.layout = layout
        self._encode = encode
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self._model_name = model_name
        self.user = user  # the model that has the state now, a weak reference: a copy of the state copies no model
        self._frequency_key = frequency_key
        self._axes = axes
        self.whole_pictures = whole_pictures
        self._limits = vocab_size, hidden_size, len(self.layers), axes  # of pictures
        self._rows = [Row.of() for _ in range(layout.rows)]
        self._pending: Pending | None = None
        self._tree: PendingTree[State] | None = None
        self._device = DeviceSteps(layout)
        self.decode_plan: object = None  # of the model that runs the layers, see `lmstate.models.stack`

    # ---- content

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
        return [row.length for row in self._rows]

    @property
    def removed(self) -> frozenset[int]:
        """The rows that were removed, and not added again."""
        return frozenset(row for row, own in enumerate(self._rows) if own.removed)

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

    @ordinary_tensors
    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        twin = memo[id(self)] = object.__new__(type(self))
        with CopiedGraphs():
            twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a State belongs to its model and cannot be pickled; pickle or save its rows, snapshot(row), and restore "
            "them in a state of that model"
        )

    def tokens(self, row: int) -> list[int]:
        """The ids of a row's committed tokens."""
        _, own = self._row(row)
        return own.tokens

    def source(self, row: int) -> list[int] | SourceFeatures | None:
        """The source of a row, ids or features without their values; None where it has none."""
        _, own = self._row(row)
        return list(own.source) if isinstance(own.source, tuple) else own.source

    def media(self, row: int) -> tuple[MediaSpan, ...]:
        """The pictures of a row and where they stand, in order. Those placed behind its last token are to come."""
        _, own = self._row(row)
        return own.media

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

    def memory(self) -> Memory:
        """Bytes held now, by layer kind; `logits`, `marks`, `media`, `positions`, `tree` beside them, if there are any.

        A block counts once, however many rows hold it; `shared` of the result says how many bytes lie in blocks that
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

    def blocks(self) -> Iterator[KVBlock]:
        """Blocks of all rows and layers, see `LayerState.blocks`. Marks aside."""
        for layer in self.layers:
            yield from layer.blocks()

    def nbytes_apart(self) -> int:
        """Bytes of all in no blocks: carries, slots of policies that evict, pictures, last logits. Marks aside."""
        beside = {**self._logits_held(), **held_tensors(row.media for row in self._rows)}
        return sum(layer.nbytes_apart() for layer in self.layers) + sum(beside.values())

    def _logits_held(self) -> dict[int, int]:
        """Bytes of each tensor of logits, by where it lies."""
        logits = {row.logits.data_ptr(): row.logits.nbytes for row in self._rows if row.logits is not None}
        if self._pending is not None and self._pending.logits is not None:
            logits[self._pending.logits.data_ptr()] = self._pending.logits.nbytes
        return logits

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
        for index, (row, length, count) in enumerate(zip(self._rows, self._rope_lengths(counts), counts)):
            key = self._frequency_key(length)
            to = 0 if row.cached and key != row.frequency_key else row.cached
            if logits and not count and row.logits is None and row.cached == row.length > 0:
                to = min(to, before_picture(row.media, row.length - 1) if self.whole_pictures else row.length - 1)
            # Each row in a change of its own: the next one starts from the tensors that this one leaves.
            changes = Changes()
            new = rewind_layers(self.layers, index, row, to, changes)
            new = new if new.cached or new.frequency_key == key else new._replace(frequency_key=key)
            if (gone := _without_embeddings(new, new.length)) is not None:
                raise StateError(f"row {index} is to be computed from {new.cached} on, and {gone}")
            if new is not row:
                self._apply(changes, self._with(index, new))
        return [row.backlog for row in self._rows]

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
        assert all(row.cached == row.length for row in self._rows), "plan before the backlog was computed"
        for index, (row, new) in enumerate(zip(self._rows, ids)):
            self._check_media(index, row, new)
            if (cut := self._parted(row, row.length + len(new))) is not None:
                raise StateError(f"row {index} was given {len(new)} tokens, up to {row.length + len(new)}, {cut}")
        partly = None if all(rewindable) else tuple(rewindable)
        return self._reserve([list(row) for row in ids], speculative, self._rope_lengths(counts), partly)

    @property
    def planned(self) -> Pending:
        """The step that was planned, for what runs it."""
        assert self._pending is not None, "nothing was planned"
        return self._pending

    def record_logits(self, logits: Tensor | None, kept: Sequence[int] | None = None) -> None:
        """The planned step's forward is done; its logits are `[R, T, V]`, `[R, V]` of the last tokens, or `[R, K, V]`
        of the last `kept[r]` of each row."""
        assert self._pending is not None
        self._pending = Pending(self._pending.step, self._pending.ids, logits, kept, ready=True)

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

    def discard(self) -> None:
        """The pending tokens never happened. Harmless if nothing is pending."""
        self._read_device_step()
        self._tree = None
        if self._pending is not None:
            self._pending = replace(self._pending, ready=False)  # whatever interrupts the rest of it
            for layer in self.layers:
                layer.discard()
            self._pending = None

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
        if own.length:
            raise StateError(
                f"condition({row}, ...) was asked for, and row {row} holds {own.length} tokens; a source comes before "
                "the first token: rewind the row to 0, or use another row"
            )
        if not isinstance(source, SourceFeatures):
            source = tuple(token_ids(source, "the source", self._vocab_size))
            if not source:
                raise StateError(f"condition({row}, ...) was given an empty source; a source has at least one token")
        changes = Changes()
        for layer, tensors in zip(self.layers, self._encode(source), strict=True):
            if layer.conditioned:
                layer.restore(row, 0, tensors, changes)
        kept = source.without_values() if isinstance(source, SourceFeatures) else source
        self._apply(changes, self._with(row, own._replace(source=kept, logits=None, marks=())))

    @ordinary_tensors
    def queue(self, row: int, ids: Sequence[int]) -> None:
        """Append tokens that count as seen now and are computed at the start of the next call."""
        row, own = self._row(row)
        self._refuse_pending("queue tokens", row)
        if ids := token_ids(ids, f"row {row}", self._vocab_size):
            if (cut := self._parted(own, own.length + len(ids))) is not None:
                raise StateError(f"row {row} was to queue {len(ids)} tokens, up to {own.length + len(ids)}, {cut}")
            self._check_capacity([len(ids) if i == row else 0 for i in range(self.rows)])
            self._check_media(row, own, ids)
            self._apply(Changes(), self._with(row, own.extended(ids)._replace(logits=None)))

    @ordinary_tensors
    def place(self, row: int, at: int, media: Media) -> None:
        """Announce that a picture stands in a row from position `at` on, which none of its tokens has reached yet.

        The next calls bring its tokens, `media.token` at each of its positions, whole or in parts, and read its
        embeddings instead of theirs. Until a rewind to `at` or before. One that already stands there gets back the
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
        spans = tuple(span for span in own.media if span.at != at or span.media != media)
        if len(spans) == len(own.media) and at < own.length:
            raise StateError(f"{where}; the row has {own.length} tokens: rewind to {at} first")
        spans = tuple(sorted((*spans, MediaSpan(at, media)), key=lambda span: span.at))
        if (why := refusal(spans, own.tokens, *self._limits)) is not None:
            raise StateError(f"{where}; {why}")
        limits = (self.layout.capacity, self.layout.max_positions)
        if at + media.count > min((limit for limit in limits if limit is not None), default=at + media.count):
            raise CapacityError(f"{where}; its {media.count} positions do not fit the state")
        self._apply(Changes(), self._with(row, own._replace(media=spans)))

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
        media = tuple(span for span in own.media if span.at < to)
        if (cut := self._parted(own, to)) is not None:
            raise RewindError(f"rewind of row {row} to {to} was asked for, {cut}")
        if to == own.length and media == own.media:
            return
        changes, marks = Changes(), tuple(mark for mark in own.marks if mark.at <= to)
        known = next((mark.logits for mark in marks if mark.at == to), None)
        back = rewind_layers(self.layers, row, own, to, changes)._replace(
            length=to, expected=0, logits=known, marks=marks, media=media
        )
        if (gone := _without_embeddings(back, to)) is not None:
            raise RewindError(
                f"rewind of row {row} to {to} was asked for; it is computed from {back.cached} on, and {gone}, or "
                f"rewind to {self._computable(row, own, to)}"
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
        return to - base if own.frequency_key == self._frequency_key(max(to + 1, expected)) else to

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
        self._apply(changes, [Row.of() if row is None else self._rows[row].fork() for row in sources])

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
        changes, new = Changes(), Row.of()
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
        self._apply(changes, self._with(row, Row.of()._replace(removed=True)))

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
            tuple(own.tokens), own.cached, own.frequency_key, logits, layers, self.fingerprint, model=self._model_name,
            source=own.source, media=own.media,
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
        restored = snapshot.as_row(self._vocab_size, self.layers[-1].device or self.layout.device)
        if len(snapshot.layers) != len(self.layers):
            raise SnapshotError(f"the snapshot has {len(snapshot.layers)} layers; this state has {len(self.layers)}")
        for span in restored.media:
            if (why := self._refuses_media(span.media)) is not None:
                raise UnsupportedError(f"the snapshot has a picture at {span.at}; {why}")
        why = refusal(restored.media, restored.tokens, *self._limits)
        if why is not None:
            raise SnapshotError(f"the snapshot is damaged, or of another model: {why}")
        if self.layout.capacity is not None and restored.length > self.layout.capacity:
            raise CapacityError(
                f"the snapshot has {snapshot.length} tokens; this state was made with capacity={self.layout.capacity}"
            )
        sourced = [bool(captured) for layer, captured in zip(self.layers, snapshot.layers) if layer.conditioned]
        for position in (restored.cached, restored.length):
            if (cut := self._parted(restored, position)) is not None:
                raise SnapshotError(f"the snapshot is damaged, or of another model: it ends at {position}, {cut}")
        if set(sourced or [False]) != {restored.source is not None}:
            raise SnapshotError("the snapshot is damaged: it has a source without its keys and values, or the reverse")
        return restored, snapshot.layers

    # ---- the parts of it

    def _row(self, row: int) -> tuple[int, Row]:
        """A row that a caller named: its index as a plain int, and its record."""
        number = whole_number(row, "a row")
        if not 0 <= number < self.rows:
            raise StateError(f"row {row} was asked for; the state has the rows 0 to {self.rows - 1}")
        if self._rows[number].removed:
            raise StateError(f"row {row} was asked for, and was removed; add() may give its number to another one")
        return number, self._rows[number]

    def _rewindable(self, row: int, to: int) -> tuple[int, int, Row]:
        """Row and position as plain ints, and the record of the row."""
        row, own = self._row(row)
        to = whole_number(to, "a position")
        self._refuse_pending("rewind", row)
        if not 0 <= to <= own.length:
            raise RewindError(f"rewind of row {row} to {to} was asked for; it has the positions 0 to {own.length}")
        return row, to, own

    def _droppable(self, row: int, start: int, stop: int) -> tuple[int, int, int, Row]:
        """Row and span as plain ints, and the record of the row."""
        row, own = self._row(row)
        start, stop = whole_number(start, "the start of a span"), whole_number(stop, "the end of a span")
        self._refuse_pending("drop a span")
        if not 0 <= start <= stop <= own.length:
            raise RewindError(f"drop of {start} to {stop} was asked for; row {row} has positions 0 to {own.length}")
        return row, start, stop, own

    def _refuses_drop(self, row: int, start: int, stop: int) -> str | None:
        own, short_key = self._rows[row], self._frequency_key(0)
        return refuses_drop(self.layers, self.layout, row, own, start, stop, short_key)

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

    def _refuses_media(self, media: Media) -> str | None:
        """Reason that no row of this state has such a picture; None if one can."""
        if self.layout.static:
            return "a static state takes no pictures: make one with static=False"
        if self.evicts and media.positions is not None:
            return "its positions have several axes, and a policy that evicts rotates by one: make a state without it"
        if self.evicts and self.whole_pictures:
            return "this model computes it as one piece, and a policy that evicts does not: make a state without it"
        return None

    def refuses_media(self, tokens: Sequence[int], spans: Sequence[MediaSpan]) -> str | None:
        """Reason that no row can have these tokens and pictures; None if one can."""
        for span in spans:
            if (why := self._refuses_media(span.media)) is not None:
                return f"the picture at {span.at} was refused: {why}"
            if span.end > len(tokens):
                return f"the picture at {span.at} ends at {span.end}, behind the last of {len(tokens)} tokens"
        return refusal(tuple(spans), tokens, *self._limits)

    def _parted(self, row: Row, position: int) -> str | None:
        """The rest of a complaint about a cut of a row inside a picture that is computed as one piece; None for none.

        The next tokens, `media.token` at its positions, come together.
        """
        if not (self.whole_pictures and row.media) or (span := inside(row.media, position)) is None:
            return None
        return (
            f"inside a picture that this model computes as one piece: its positions are {span.at} to {span.end}, so "
            f"stop at {span.at} or at {span.end}"
        )

    def _check_media(self, row: int, own: Row, ids: Sequence[int]) -> None:
        if own.media and (why := misplaced(own.media, own.length, ids)) is not None:
            raise StateError(f"row {row} was given other tokens than its pictures have: {why}")

    def _refuse_pending(self, what: str, row: int | None = None) -> None:
        pending = self.pending
        tree = self._tree is not None and self._tree.waits
        waits = tree or (self._pending is not None and self._pending.waits)
        if waits and (row is None or pending[row] or tree):
            raise PendingError(f"cannot {what}: the rows have {pending} pending tokens; call commit or discard first")
        planned = self._pending is not None and not self._pending.ready
        if not waits and (row is None or planned or self._tree is not None):
            self.discard()  # beside one row that moves, a step of no tokens stays as one of other rows' tokens does

    def _check_capacity(self, counts: Sequence[int]) -> None:
        for index, (row, count) in enumerate(zip(self._rows, counts)):
            if count:
                check_room(row, index, count, self.layout.capacity, self.layout.max_positions, self.conditioned)

    def _rope_lengths(self, counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(row.length + count, row.expected) for row, count in zip(self._rows, counts))

    def _reserve(
        self,
        ids: list[list[int]],
        speculative: bool,
        rope_lengths: tuple[int, ...],
        rewindable: tuple[bool, ...] | None = None,
    ) -> Step:
        counts = tuple(map(len, ids))
        starts = tuple(row.cached for row in self._rows)
        media = tuple(row.media for row in self._rows) if any(row.media for row in self._rows) else ()
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

    def _with(self, row: int, new: Row) -> list[Row]:
        return [*self._rows[:row], new, *self._rows[row + 1 :]]

    def _apply(self, changes: Changes, rows: list[Row], *, ends_step: bool = False) -> None:
        """Make the changes of the layers real, and these the rows."""
        self._device.sync(rows, changes)
        changes.assign(self, "_rows", rows)
        if ends_step:
            changes.assign(self, "_pending", None)
        changes.apply()

    def _logits_if_valid(self, row: Row, logits: Tensor | None) -> Tensor | None:
        """A copy of the logits after a row's last token, where its keys are rotated as its text is to have them.

        A draft may pass a border that what is accepted of it does not: they are unknown until a call asks for them.
        """
        return logits.clone() if logits is not None and row.frequency_key == self._logits_key(row) else None

    def _logits_key(self, row: Row) -> int:
        """The frequency key of a row's last logits."""
        return self._frequency_key(max(row.length, row.expected))

    def _logits_of_its_length(self, row: Row) -> Tensor | None:
        """The last logits, where they would be the same for the longer text that is expected."""
        return row.logits if self._logits_key(row) == self._frequency_key(row.length) else None


def _without_embeddings(row: Row, stop: int) -> str | None:
    """Complaint about a picture before `stop` that the layers of a row miss, and whose embeddings were let go."""
    for span in within(row.media, row.cached, stop):
        if span.media.embeddings is None:
            return f"the embeddings of the picture at {span.at} to {span.end} were let go: place it there again first"
    return None
