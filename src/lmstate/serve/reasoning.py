"""Reasoning before an answer, told from the answer by the markers that its chat template names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmstate.serve.tools.events import Reasoning
from lmstate.serve.tools.reader import Parse, Reader


@dataclass(frozen=True)
class ReasoningMarkers:
    start: str
    end: str

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt already begins the reasoning, as some templates do."""
        return prompt.rstrip().endswith(self.start)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt holds the reasoning, empty, since none is wanted."""
        return prompt.rstrip().endswith(self.end)

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


KNOWN = (
    ReasoningMarkers("<think>", "</think>"),
    ReasoningMarkers("[THINK]", "[/THINK]"),
    ReasoningMarkers("<seed:think>", "</seed:think>"),
)


def reasoning_of(template: str | None) -> ReasoningMarkers | None:
    """The markers that a chat template writes; None if the model does not think aloud."""
    return next((known for known in KNOWN if template and known.end in template), None)
