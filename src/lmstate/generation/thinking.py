"""The thinking section of an answer, which may be ended early: then the template's closing text comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmstate.errors import UnsupportedError
from lmstate.text.thinking import ThinkingMarkers, closing_text, thinking_markers

if TYPE_CHECKING:
    from lmstate.text.tokenizer import Tokenizer

TAIL = 16  # tokens among which a marker is looked for


@dataclass(frozen=True)
class ThinkingFormat:
    """Marks of a thinking section, and the tokens that end one."""

    tokenizer: Tokenizer
    markers: ThinkingMarkers
    closing: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Tokenizer) -> ThinkingFormat:
        """Raises UnsupportedError for a chat template that has no thinking section."""
        if (markers := thinking_markers(tokenizer.template_source)) is None:
            raise UnsupportedError(
                "the end of a thinking section was asked for; this model's chat template writes none: leave it out"
            )
        text = closing_text(tokenizer, markers)
        return ThinkingFormat(tokenizer, markers, tuple(tokenizer.encode(text, add_special_tokens=False)))

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), False)


class Thinking:
    """Whether an answer is in its thinking section, and which token has to come next to end it.

    `limit`: tokens that the section may have; None for any number.
    """

    def __init__(self, format: ThinkingFormat, prompt: Sequence[int], limit: int | None) -> None:
        self.limit = limit
        self.count = 0  # tokens of the section, without its markers
        self._format = format
        self._tokens: list[int] = []
        self._open: bool | None = format.markers.opened_by(format.text(prompt[-TAIL:])) or None  # None: may yet begin
        self._closing: list[int] = []  # that have to come

    def take(self, token: int) -> None:
        """The answer goes on with this token."""
        if self._closing:
            self._closing.pop(0)
            return
        self._tokens.append(token)
        markers = self._format.markers
        if self._open is None:
            begun = self._format.text(self._tokens[:TAIL]).lstrip()
            if begun.startswith(markers.start):
                self._open = True
            elif not markers.start.startswith(begun) or len(self._tokens) > TAIL:
                self._open = False
        elif self._open:
            self.count += 1
            self._open = markers.end not in self._format.text(self._tokens[-TAIL:])

    def end(self) -> None:
        """Have the section end now, if the answer is in it, or where it begins."""
        self.limit = 0

    def forced(self) -> int | None:
        """The token that has to come next; None if any may."""
        if self._open and self.limit is not None and self.count >= self.limit:
            self._open = False
            self._closing = list(self._format.closing)
        return self._closing[0] if self._closing else None
