"""Text that comes in pieces, read by generators as if it were all there.

A parser is a generator: it yields events, or `None` when it needs more text. `Parser` drives it. How the text is cut
cannot matter, since the primitives below hold back what may still turn into something else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from lmstate.serve.tools.events import CallArguments, Event

R = TypeVar("R")
Parse: TypeAlias = Generator[Event | None, None, R]

SPACE = " \t\r\n"


class Reader:
    """The text that was not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.closed = False
        self._taken: list[str] = []  # what was read since `record`

    def record(self) -> None:
        """Remember what is read from here on, for `unread`."""
        self._taken.clear()

    def unread(self) -> None:
        self.text = "".join(self._taken) + self.text
        self._taken.clear()

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        self._taken.append(taken)
        return taken

    def until(self, markers: Sequence[str], event: Callable[[str], Event] | None) -> Parse[str | None]:
        """Pass text on as events up to the first of `markers`, which is read too and returned; None at the end.

        Without `event`, the text is dropped.
        """
        while True:
            found = [(at, -len(marker), marker) for marker in markers if (at := self.text.find(marker)) >= 0]
            held = 0 if self.closed else max((overlap(self.text, marker) for marker in markers), default=0)
            if found:
                at, _, marker = min(found)
                # A longer marker may yet begin before this one ends.
                if at < len(self.text) - held or at + len(marker) == len(self.text):
                    before = self.take(at)
                    self.take(len(marker))
                    if before and event is not None:
                        yield event(before)
                    return marker
            before = self.take(len(self.text) - held)
            if before and event is not None:
                yield event(before)
            if self.closed:
                return None
            yield None

    def collect(self, markers: Sequence[str]) -> Parse[tuple[str, str | None]]:
        """(text up to the first of `markers`, that marker or None at the end)."""
        pieces: list[str] = []
        reading = self.until(markers, CallArguments)
        while True:
            try:
                event = next(reading)
            except StopIteration as end:
                return "".join(pieces), end.value
            if isinstance(event, CallArguments):
                pieces.append(event.text)
            else:
                yield None

    def at_least(self, count: int) -> Parse[bool]:
        """Wait until `count` characters are there; False if the text ends before."""
        while len(self.text) < count:
            if self.closed:
                return False
            yield None
        return True

    def skip_space(self, also: str = "") -> Parse[None]:
        while True:
            self.take(len(self.text) - len(self.text.lstrip(SPACE + also)))
            if self.text or self.closed:
                return
            yield None

    def accept(self, literal: str) -> Parse[bool]:
        """Read `literal` if the text goes on with it."""
        while len(self.text) < len(literal) and literal.startswith(self.text) and not self.closed:
            yield None
        if self.text.startswith(literal):
            self.take(len(literal))
            return True
        return False

    def json_value(self, event: Callable[[str], Event] | None = None) -> Parse[str]:
        """The text of one JSON value, passed on as it comes if there is an `event`. Cut short where the text ends."""
        scan, pieces = JsonScan(), []
        while True:
            piece = self.take(scan.push(self.text))
            if piece:
                pieces.append(piece)
                if event is not None:
                    yield event(piece)
            if scan.complete or self.closed:
                return "".join(pieces)
            yield None


class JsonScan:
    """Finds where a JSON value ends, character by character. It does not check the value."""

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._inside = self._escaped = self._begun = False

    def push(self, text: str) -> int:
        """Number of characters of `text` that belong to the value."""
        for at, char in enumerate(text):
            if self._inside:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._inside = False
                    if self._depth == 0:
                        self.complete = True
                        return at + 1
            elif char == '"':
                self._inside = self._begun = True
            elif char in "[{":
                self._depth += 1
                self._begun = True
            elif char in "]}":
                if self._depth == 0:  # the end of what holds a number or a word
                    self.complete = True
                    return at
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return at + 1
            elif self._depth == 0 and self._begun and char in "," + SPACE:
                self.complete = True
                return at
            elif char not in SPACE:
                self._begun = True
        return len(text)


def overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class Parser:
    """Runs a parser over text as it comes: `push` for every piece, `finish` at the end."""

    def __init__(self, parse: Callable[[Reader], Parse[None]]) -> None:
        self._reader = Reader()
        self._parse = parse(self._reader)
        self._ended = False

    def push(self, text: str) -> list[Event]:
        self._reader.text += text
        return self._run()

    def finish(self) -> list[Event]:
        self._reader.closed = True
        return self._run()

    def _run(self) -> list[Event]:
        events: list[Event] = []
        while not self._ended:
            try:
                event = next(self._parse)
            except StopIteration:
                self._ended = True
                break
            if event is None:
                break
            events.append(event)
        return events
