"""Control tokens written in the texts of a conversation: they stay text beside those that the template writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MARKS = range(0x10FFFD, 0xFFFFF, -1)  # a private use plane, from where fonts of icons have nothing
# Such a character in a text beside control tokens, or what would be read as its escape: hidden as they are.
TAKEN = "[\U00100000-\U0010fffd]|(?i:\\\\udb[c-f][0-9a-f]\\\\ud[c-f][0-9a-f]{2}|\\\\U0010[0-9a-f]{4})"


def control_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of the tokens, the longest first."""
    words = sorted(filter(None, tokens), key=len, reverse=True)
    groups: dict[str, list[str]] = {}  # by their beginning: some tokenizers have a thousand, and most text has none
    for word in words:
        groups.setdefault(word[:2], []).append(re.escape(word[2:]))
    ordered = sorted(groups.items(), key=lambda group: -len(group[0]))
    return re.compile("|".join(f"{re.escape(start)}(?:{'|'.join(rest)})" for start, rest in ordered) or "(?!)")


@dataclass
class ControlTokens:
    """Characters that stand for the control tokens of one conversation while a template renders it."""

    pattern: re.Pattern[str]
    marks: dict[str, str] = field(default_factory=dict)  # a token's text -> its character

    def hide(self, value: Any) -> Any:
        """A text with its control tokens replaced; in objects and arrays, each text inside. Raises ValueError."""
        if not self.marks and not any(map(self.pattern.search, _texts(value))):
            return value
        taken = re.compile(f"{self.pattern.pattern}|{TAKEN}")
        return self._hide(value, taken)

    def _hide(self, value: Any, taken: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return taken.sub(lambda found: self._mark(found[0]), value)
        if isinstance(value, Mapping):
            return {self._hide(key, taken): self._hide(one, taken) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(one, taken) for one in value]
        return value

    def _mark(self, token: str) -> str:
        if token not in self.marks:
            if len(self.marks) == len(MARKS):
                raise ValueError(f"the conversation has more than {len(MARKS)} different control tokens in its texts")
            self.marks[token] = chr(MARKS[len(self.marks)])
        return self.marks[token]

    def rendered(self, text: str) -> str:
        """A template's text, with characters that it wrote as escapes (in JSON, say) as they were."""
        for mark in self.marks.values():
            for escaped in (json.dumps(mark)[1:-1], ascii(mark)[1:-1]):
                text = text.replace(escaped, mark)
        return text

    def show(self, text: str) -> str:
        """A rendered text with the tokens in place of their characters."""
        return "".join(piece for piece, _ in self.pieces(self.rendered(text)))

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of a rendered text, in turn: (text, whether it is a control token that stays text)."""
        tokens = {mark: token for token, mark in self.marks.items()}
        for piece in re.split(f"([{''.join(tokens)}])", text) if tokens else [text]:
            if piece:
                yield tokens.get(piece, piece), piece in tokens


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
