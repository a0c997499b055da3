"""Control tokens written in the texts of a conversation: they stay text beside those that the template writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MARKS = range(0xF0000, 0xFFFFE)  # a private use plane: characters that no text has


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
        """A text with its control tokens replaced; in objects and arrays, each text inside."""
        if isinstance(value, str):
            return self.pattern.sub(lambda found: self._mark(found[0]), value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(one) for one in value]
        return value

    def _mark(self, token: str) -> str:
        return self.marks.setdefault(token, chr(MARKS[len(self.marks)]))

    def rendered(self, text: str) -> str:
        """A template's text, with characters that it wrote as escapes (in JSON, say) as they were."""
        for mark in self.marks.values():
            for escaped in (json.dumps(mark)[1:-1], ascii(mark)[1:-1]):
                text = text.replace(escaped, mark)
        return text

    def show(self, text: str) -> str:
        """A rendered text with the tokens in place of their characters."""
        text = self.rendered(text)
        for token, mark in self.marks.items():
            text = text.replace(mark, token)
        return text

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of a rendered text, in turn: (text, whether it is a control token that stays text)."""
        tokens = {mark: token for token, mark in self.marks.items()}
        for piece in re.split(f"([{''.join(tokens)}])", text) if tokens else [text]:
            if piece:
                yield tokens.get(piece, piece), piece in tokens
