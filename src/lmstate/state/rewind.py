"""Taking the layers of a row back to an earlier position."""

from __future__ import annotations

from collections.abc import Sequence

from lmstate.state.changes import Changes
from lmstate.state.layers.base import LayerState
from lmstate.state.media import within
from lmstate.state.rows import Mark, Row


def nearest_mark(layers: Sequence[LayerState], row: int, own: Row, to: int) -> tuple[int, Mark | None]:
    """The last position at or before `to` that needs no token computed, and the mark that holds it, if one does.

    `own`: the record of the row. A mark is of use only beside layers of its own `frequency_key`: it holds those that
    forget, and the others as they are now go on from it.
    """
    if to >= own.cached:
        return own.cached, None
    if to >= max((layer.earliest_rewind(row, own.cached) for layer in layers), default=0):
        return to, None
    marks = [mark for mark in own.marks if mark.at <= to and mark.frequency_key == own.frequency_key]
    last = max(marks, key=lambda mark: mark.at, default=None)
    return (0, None) if last is None else (last.at, last)


def rewind_layers(layers: Sequence[LayerState], row: int, own: Row, to: int, changes: Changes) -> Row:
    """Take the layers of a row back to `to`, or as little before it as can be. Its tokens stay."""
    base, mark = nearest_mark(layers, row, own, to)
    if base == own.cached:
        return own
    for index, layer in enumerate(layers):
        if mark is not None and layer.lossy:
            layer.restore(row, base, mark.layers[index], changes)
        elif base == 0:
            layer.forget_tokens(row, changes)
        else:
            layer.rewind(row, own.cached, base, changes)
    return own._replace(cached=base)


def lost_embeddings(row: Row, stop: int, ahead: int) -> str | None:
    """Complaint about a picture before `stop` that the layers of a row miss, and whose embeddings were let go.

    ahead: positions in front of the row that its caller does not count.
    """
    for span in within(row.media, row.cached, stop):
        if span.media.embeddings is None:
            return (
                f"computed from {max(0, row.cached - ahead)} on, and the embeddings of the picture at "
                f"{span.at - ahead} to {span.end - ahead} were let go: place it there again first"
            )
    return None
