"""Learned positions in front of every row of a model: prompt tuning and prefix tuning."""

from __future__ import annotations

from dataclasses import dataclass

from lmstate.state.media import Media, MediaSpan, Spans
from lmstate.state.rows import Row


@dataclass(frozen=True)
class RowOpening:
    """Positions that each row begins with, and that its caller does not count: those of its tokens follow them.

    `media` is there. An empty row has it, and it is computed with the row's first tokens.
    """

    media: Media

    @property
    def count(self) -> int:
        """P: the number of positions."""
        return self.media.count

    def before(self, row: Row) -> Row:
        """A row, as its caller counts, with the opening in front of it; `cached` counts the opening already."""
        media = (MediaSpan(0, self.media), *_moved(row.media, self.count))
        ids = [*[self.media.token] * self.count, *row.tokens]
        return row._replace(ids=ids, length=len(ids), media=media)

    def behind(self, spans: Spans) -> Spans:
        """The pictures after it, as the caller counts."""
        return _moved(spans[1:], -self.count)


def _moved(spans: Spans, by: int) -> Spans:
    return tuple(MediaSpan(span.at + by, span.media) for span in spans)
