"""The text of one row's answer as its tokens arrive, and which of the tokens that text stands for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Literal, Protocol

from lmstate.generation.stopping import StopScanner

CONTEXT = 4  # tokens of the prompt that the text of an answer can depend on: UTF-8 has at most 4 bytes in a character
Finish = Literal["eos", "stop", "length", "capacity"]


class TextLike(Protocol):
    """A stream of the text of tokens, as `Tokenizer.stream` gives."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class NoText:
    """The text stream of a model without a tokenizer: nothing."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Answer:
    """Tokens in, text out. `text` is all that `take` and `finish` have returned so far.

    `before` are the tokens that the answer follows: a token's text can depend on its left neighbors (some tokenizers
    drop a space at the beginning of a text, and a character can span tokens). A stop string that is complete within
    the first `min_tokens` ends nothing; with `include_stop` the one that ends the text is the end of it.
    """

    def __init__(
        self,
        stream: TextLike,
        stops: Sequence[str],
        before: Sequence[int] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        for token in before[-CONTEXT:]:
            stream.push(token)
        self.tokens: list[int] = []
        self.finished: Finish | None = None
        self._stream = stream
        self._scanner = StopScanner(stops, include_stop)
        self._min_tokens = min_tokens
        self._ends: list[int] = []  # characters of text after each token
        self._characters = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._scanner.found

    def take(self, token: int) -> str:
        """One more token. Returns the text that is certain now: whole characters, none that may yet be cut off."""
        self.tokens.append(token)
        piece = self._stream.push(token)
        self._characters += len(piece)
        self._ends.append(self._characters)
        return self._scan(piece)

    def finish(self, why: Finish) -> str:
        """The answer ends here. Returns the text held back until now."""
        self.finished = why
        piece = self._scan(self._stream.flush())
        if self._scanner.cut is not None:
            return piece
        rest = self._scanner.flush()
        self._pieces.append(rest)
        return piece + rest

    def take_back(self, pieces: Sequence[str]) -> None:
        """The last tokens were never given: those that returned these pieces, `finish` included. The answer is over."""
        count = len(pieces) - (self.finished == "eos")
        left = len(self.tokens) - count
        del self.tokens[left:], self._ends[left:]
        text = self.text
        self._pieces = [text[: len(text) - sum(map(len, pieces))]]
        self.finished = None

    def kept(self) -> int:
        """Number of `tokens` that the state is to hold: all, or those wholly before where a stop string cuts the text.

        Tokens at the edge without text of their own go too: they may be the first bytes of the stop string's character.
        """
        if self._scanner.cut is None:
            return len(self.tokens)
        count = bisect_right(self._ends, self._scanner.cut)
        while count and self._ends[count - 1] == (self._ends[count - 2] if count > 1 else 0):
            count -= 1
        return count

    def certain(self) -> int:
        """Number of `tokens` that begin in the text for certain: all of them, once it ended without a stop string.

        Tokens without text of their own wait for the next one: they may be the first bytes of the stop string.
        """
        scanner, count = self._scanner, len(self.tokens)
        if not scanner.stops or (self.finished is not None and scanner.cut is None):
            return count
        # Each token begins where the one before it ends.
        return min(bisect_left(self._ends, scanner.certain) + 1, count) if scanner.certain else 0

    def _scan(self, piece: str) -> str:
        certain = self._scanner.push(piece, len(self.tokens) > self._min_tokens) if piece else ""
        if self._scanner.cut is not None:
            self.finished = "stop"
        if certain:
            self._pieces.append(certain)
        return certain
