"""Reasoning before an answer, told from the answer by the markers that its chat template names."""

from __future__ import annotations

from collections.abc import Callable

from lmstate.serve.tools.events import Reasoning
from lmstate.serve.tools.reader import Parse, Reader
from lmstate.text import thinking


class ReasoningMarkers(thinking.ThinkingMarkers):
    """Texts around the reasoning of an answer."""

    def parse(self, answer: Callable[[Reader], Parse[None]], opened: bool) -> Callable[[Reader], Parse[None]]:
        """A parser of reasoning, then of the answer."""

        def parse(reader: Reader) -> Parse[None]:
            begun = opened
            if not begun:
                reader.record()
                yield from reader.skip_space()
                begun = yield from reader.accept(self.start)
                if not begun:
                    reader.unread()
            if begun:
                yield from reader.accept("\n")
                yield from reader.until((self.end,), Reasoning)
                yield from reader.skip_space()
            yield from answer(reader)

        return parse


KNOWN = tuple(ReasoningMarkers(markers.start, markers.end, markers.token) for markers in thinking.KNOWN)


def reasoning_of(template: str | None) -> ReasoningMarkers | None:
    """The markers that a chat template writes; None if the model does not think aloud."""
    markers = thinking.thinking_markers(template)
    return None if markers is None else KNOWN[thinking.KNOWN.index(markers)]
