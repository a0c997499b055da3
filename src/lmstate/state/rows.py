"""The host's record of one sequence: token ids, and checkpoints to come back to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lmstate.errors import CapacityError, StateError
from lmstate.ops.types.block_table import KVBlock
from lmstate.state.blocks import held_by
from lmstate.state.media import Spans
from lmstate.state.sources import Source


@dataclass(frozen=True)
class Mark:
    """A checkpoint of a row at one position, for the layers that forget."""

    at: int
    frequency_key: int  # the row's, when it was made
    layers: dict[int, Mapping[str, Tensor]]
    logits: Tensor | None

    def held(self) -> Iterable[KVBlock | Tensor]:
        """Blocks that a row may hold too, and tensors."""
        yield from (held for layer in self.layers.values() for held in held_by(layer))
        if self.logits is not None:
            yield self.logits


class Row(NamedTuple):
    """A sequence as of now; a change of it is another `Row`."""

    ids: list[int]
    """The ids of its tokens, `length` of them; those after count for nothing, and the next ones take their places."""
    length: int = 0
    cached: int = 0  # how many of the tokens the layers have seen; the rest is computed by the next call
    frequency_key: int = 0  # of the ropes that rotated the cached keys, see State
    expected: int = 0  # tokens that the text will have at least; ropes that depend on the length use it
    logits: Tensor | None = None  # [V] after the last token, as a text of this length, or the expected one, has them
    marks: tuple[Mark, ...] = ()
    source: Source | None = None  # what it is conditioned on
    media: Spans = ()  # its pictures, in order; those after its last token are still to come
    removed: bool = False  # its number is free for the next one that is added

    @staticmethod
    def of(tokens: Iterable[int] = (), cached: int = 0, frequency_key: int = 0, logits: Tensor | None = None) -> Row:
        ids = list(tokens)
        return Row(ids, len(ids), cached, frequency_key, logits=logits)

    @property
    def tokens(self) -> list[int]:
        return self.ids[: self.length]

    @property
    def backlog(self) -> list[int]:
        """The tokens that the layers have not seen."""
        return self.ids[self.cached : self.length]

    def fork(self) -> Row:
        return self._replace(ids=self.tokens)

    def extended(self, ids: Sequence[int]) -> Row:
        """With more tokens, after the present ones in the same list: only one such row can come to be."""
        del self.ids[self.length :]
        self.ids.extend(ids)
        return self._replace(length=self.length + len(ids))


def check_room(
    row: Row, index: int, count: int, capacity: int | None, max_positions: int | None, conditioned: bool, ahead: int = 0
) -> None:
    """Raise `StateError` or `CapacityError` where a row cannot take `count` more tokens.

    index: of the row. max_positions: how many the model has learned. conditioned: whether its tokens read a source.
    ahead: positions in front of its tokens that its caller does not count, see `RowOpening`.
    """
    if row.removed:
        raise StateError(f"row {index} was given {count} tokens, and was removed: give it none")
    if conditioned and row.source is None:
        raise StateError(
            f"row {index} was given {count} tokens and has no source; call state.condition({index}, source) first"
        )
    given = f"row {index} holds {row.length - ahead} tokens and was given {count} more"
    if capacity is not None and row.length + count > capacity:
        raise CapacityError(
            f"{given}; the state was made with capacity={capacity - ahead}: rewind or drop tokens, or make a larger "
            "state"
        )
    if max_positions is not None and row.length + count > max_positions:
        raise CapacityError(f"{given}; the model has learned {max_positions} positions and knows no others")
