"""Spans of tokens that are dropped from the middle of a row."""

from __future__ import annotations

from collections.abc import Sequence

from lmstate.state.layers.base import LayerState, Layout
from lmstate.state.media import MediaSpan
from lmstate.state.rows import Row


def refuses_drop(
    layers: Sequence[LayerState],
    layout: Layout,
    index: int,
    row: Row,
    start: int,
    stop: int,
    short_key: int,
    ahead: int,
) -> str | None:
    """Reason that `start .. stop - 1` of a row cannot be dropped exactly; None if it can.

    index: of the row. short_key: the frequency key of a text that has not outgrown the model's rope. ahead: positions
    in front of the row that its caller does not count.
    """
    for span in row.media:
        if span.media.positions is not None:
            return "its pictures have positions of several axes, and layers move keys along one"
        if span.media.beside:
            return "layers attend to its pictures, and which ones depends on what is between them"
        if span.at < start < span.end or span.at < stop < span.end:
            return f"it would cut the picture at {span.at - ahead} to {span.end - ahead}"
    if layout.max_positions is not None:
        return (
            "the model has learned each position by itself, and what it made of the later tokens is of the positions "
            "where they were"
        )
    if row.cached and row.frequency_key != short_key:
        return (
            "its keys are rotated for a text that has outgrown the model's rope, and layers move them as in a short one"
        )
    refusals = [
        f"layer {number} ({layer.kind}): {why}"
        for number, layer in enumerate(layers)
        if (why := layer.refuses_drop(index)) is not None
    ]
    return "; ".join([*refusals[:3], *(["..."] if len(refusals) > 3 else [])]) or None


def closed(row: Row, start: int, stop: int, cached: int) -> Row:
    """The row without its tokens `start .. stop - 1`, of which the layers had seen `cached`."""
    tokens = row.tokens
    del tokens[start:stop]
    media = tuple(
        span if span.end <= start else MediaSpan(span.at - (stop - start), span.media)
        for span in row.media
        if not start <= span.at < stop
    )
    marks = tuple(mark for mark in row.marks if mark.at <= start)
    short = Row.of(tokens, row.cached - cached, row.frequency_key, row.logits)
    return short._replace(marks=marks, source=row.source, media=media)
