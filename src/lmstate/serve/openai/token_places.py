"""Names and offsets of tokens in the text that they make, for the log probabilities of completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from lmstate.generation.row import CONTEXT
from lmstate.text.tokenizer import Tokenizer


class TokenPlace(NamedTuple):
    """`text[offset : offset + len(name)] == name` for tokens of whole characters that have a text."""

    name: str
    offset: int  # in characters; of a part of a character, that of the character


class TokenPlaces:
    """Places of the tokens of one text, token by token, after the tokens `before` it."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), start: int = 0) -> None:
        """`start`: the offset at which the text of these tokens begins."""
        self._silent = tokenizer.special_ids
        self._stream = tokenizer.stream()
        self._stream.follow(before[-CONTEXT:])
        self._end = start  # characters that the stream gave out
        self._ahead = 0  # characters that are whole, and held by the stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, token: int, raw: bytes) -> TokenPlace:
        """The place of the next token, whose bytes are `raw`."""
        own = name_of(raw)
        if token in self._silent:
            return TokenPlace(own, self._end + self._ahead)
        piece, offset = self._stream.push(token), self._end + self._ahead
        self._ahead += len(self._decoder.decode(raw))
        if not piece:
            return TokenPlace(own, offset)
        if is_whole(raw):
            if piece.endswith(own):  # after what was held, of the prompt too
                offset = self._end + len(piece) - len(own)
            else:  # as the tokenizer writes it here, without a space in front or with the mark of one
                own = piece[offset - self._end :] or own
            self._decoder.reset()
        self._end, self._ahead = self._end + len(piece), 0
        return TokenPlace(own, offset)


def name_of(raw: bytes) -> str:
    """A token's text; bytes of incomplete characters are written out."""
    return raw.decode("utf-8") if is_whole(raw) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def is_whole(raw: bytes) -> bool:
    """Whether bytes are whole characters."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
