"""The rows of a state: tokens, pictures, sources, and the layer states that hold the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

from torch import Tensor

from lmstate.errors import StateError
from lmstate.ops.types.block_table import KVBlock
from lmstate.state.changes import Changes
from lmstate.state.device import DeviceSteps
from lmstate.state.gradients import CopiedGraphs
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.state.layers.base import LayerState, Layout
from lmstate.state.layers.pictures import PictureReadingState
from lmstate.state.media import Media, MediaSpan, Spans, held_tensors, inside, misplaced, refusal
from lmstate.state.opening import RowOpening
from lmstate.state.pending import Pending
from lmstate.state.rows import Row, check_room
from lmstate.state.sources import SourceFeatures
from lmstate.state.tree import PendingTree
from lmstate.state.validate import whole_number


class HeldRows:
    """Content of each row, and the checks that all changes of it share."""

    def __init__(
        self,
        layers: Sequence[LayerState],
        layout: Layout,
        *,
        vocab_size: int,
        marks: int = 0,
        fingerprint: Callable[[], str],
        model_name: str = "",
        user: Callable[[], object],
        encode: Callable[[Sequence[int] | SourceFeatures], Sequence[Mapping[str, Tensor]]] | None = None,
        frequency_key: Callable[[int], int],
        hidden_size: int,
        axes: bool = False,
        whole_pictures: bool = False,
        opening: RowOpening | None = None,
    ):
        """`fingerprint()` names the model; it is asked for only by snapshots, and for a model that is not `user()`.
        `model_name` is the name of the model for people. `marks`: ids past the vocabulary that its texts may have.

        `encode(source)` gives each layer the keys and values of a source; None for a model without an encoder.

        `frequency_key(length)` is for ropes whose frequencies depend on the length of the text: two lengths of one key
        rotate alike, and a row that passes from one key to another is computed again from its start. `axes`: whether
        positions may have several axes, as pictures say. `whole_pictures`: whether the tokens of a picture see all of
        it, so that no step ends inside one. `opening`: learned positions in front of every row. No method counts them,
        and the capacity of the layout does.
        """
        self.layers = list(layers)
        self.evicts = any(leaf.evicts for layer in self.layers for leaf in layer.leaves())
        self.conditioned = any(layer.conditioned for layer in self.layers)
        self._attends_to_pictures = any(isinstance(layer, PictureReadingState) for layer in self.layers)
        self.layout = layout
        self._encode = encode
        self._vocab_size, self._ids = vocab_size, vocab_size + marks
        self._fingerprint = fingerprint
        self._model_name = model_name
        self.user = user  # the model that has the state now, a weak reference: a copy of the state copies no model
        self._frequency_key = frequency_key
        self._axes = axes
        self.whole_pictures = whole_pictures
        self._limits = self._ids, hidden_size, len(self.layers), axes  # of pictures
        self._opening = opening
        self._ahead = 0 if opening is None else opening.count
        self._rows = [self._empty() for _ in range(layout.rows)]
        self._pending: Pending | None = None
        self._tree: PendingTree[Any] | None = None
        self._device = DeviceSteps(layout)
        self.decode_plan: object = None  # of the model that runs the layers, see `lmstate.models.stack`

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
        return [self._length(row) for row in self._rows]

    @property
    def removed(self) -> frozenset[int]:
        """The rows that were removed, and not added again."""
        return frozenset(row for row, own in enumerate(self._rows) if own.removed)

    @ordinary_tensors
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
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
        return own.tokens[self._ahead :]

    def source(self, row: int) -> list[int] | SourceFeatures | None:
        """The source of a row, ids or features without their values; None where it has none."""
        _, own = self._row(row)
        return list(own.source) if isinstance(own.source, tuple) else own.source

    def media(self, row: int) -> tuple[MediaSpan, ...]:
        """The pictures of a row and their places, in order. Those placed after its last token are to come."""
        _, own = self._row(row)
        return self._shown(own)

    def kept(self, row: int, layer: int) -> list[list[int]]:
        """For each kv head of an attention layer, the positions of a row whose keys and values it still has in sight.

        Tokens that wait to be computed (after a rewind far back, say) are not among them. Raises `UnsupportedError` for
        a layer that keeps no positions apart.
        """
        row, own = self._row(row)
        layer = whole_number(layer, "a layer")
        if not 0 <= layer < len(self.layers):
            raise StateError(f"layer {layer} was asked for; the state has the layers 0 to {len(self.layers) - 1}")
        kept = self.layers[layer].kept(row, own.cached)
        return [[at - self._ahead for at in head if at >= self._ahead] for head in kept] if self._ahead else kept

    def blocks(self) -> Iterator[KVBlock]:
        """Blocks of all rows and layers, see `LayerState.blocks`. Marks aside."""
        for layer in self.layers:
            yield from layer.blocks()

    def nbytes_apart(self) -> int:
        """Bytes of all in no blocks: carries, slots of policies that evict, pictures, last logits. Marks aside."""
        beside = {**self._logits_held(), **held_tensors(row.media for row in self._rows)}
        return sum(layer.nbytes_apart() for layer in self.layers) + sum(beside.values())

    def _logits_held(self) -> dict[int, int]:
        """Bytes of each tensor of logits, by where it is."""
        logits = {row.logits.data_ptr(): row.logits.nbytes for row in self._rows if row.logits is not None}
        if self._pending is not None and self._pending.logits is not None:
            logits[self._pending.logits.data_ptr()] = self._pending.logits.nbytes
        return logits

    # ---- the parts of it

    def _empty(self) -> Row:
        return Row.of() if self._opening is None else self._opening.before(Row.of())

    def _length(self, own: Row) -> int:
        """Tokens of a row, as its caller counts."""
        return own.length - self._ahead

    def _shown(self, own: Row) -> Spans:
        """Pictures of a row, as its caller counts."""
        return own.media if self._opening is None else self._opening.behind(own.media)

    def _row(self, row: int) -> tuple[int, Row]:
        """A row that a caller named: its index as a plain int, and its record."""
        number = whole_number(row, "a row")
        if not 0 <= number < self.rows:
            raise StateError(f"row {row} was asked for; the state has the rows 0 to {self.rows - 1}")
        if self._rows[number].removed:
            raise StateError(f"row {row} was asked for, and was removed; add() may give its number to another one")
        return number, self._rows[number]

    def _refuses_media(self, media: Media) -> str | None:
        """Reason that no row of this state has such a picture; None if one can."""
        if self.layout.static:
            return "a static state takes no pictures: make one with static=False"
        if media.beside and not self._attends_to_pictures:
            return "it is beside the text, and no layer of this model attends to such pictures"
        if media.beside and media.embeddings is None:
            return "its embeddings were let go, and layers attend to them at each token: make it again"
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
        if own.media and (why := misplaced(self._shown(own), self._length(own), ids)) is not None:
            raise StateError(f"row {row} was given other tokens than its pictures have: {why}")

    def _check_capacity(self, counts: Sequence[int]) -> None:
        for index, (row, count) in enumerate(zip(self._rows, counts)):
            if count:
                limits = self.layout.capacity, self.layout.max_positions
                check_room(row, index, count, *limits, self.conditioned, self._ahead)

    def _rope_lengths(self, counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(row.length + count, row.expected) for row, count in zip(self._rows, counts))

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
