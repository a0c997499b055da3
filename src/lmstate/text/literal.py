"""Encode a text in which some control tokens are tokens and others are written letters."""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


class LiteralTokenizer:
    """A copy of a tokenizer to which a control token's text is letters; the token itself has an alias.

    The text is encoded as one, so that what surrounds written control tokens (spaces that a normalizer puts, merges)
    is as in any text. An alias holds a random number: no text of a conversation can have it.
    """

    def __init__(self, inner: tokenizers.Tokenizer, control: re.Pattern[str]) -> None:
        from tokenizers import AddedToken

        self._inner = copy.deepcopy(inner)
        self._control = control
        secret = secrets.token_hex(8)
        added = self._inner.get_added_tokens_decoder()
        controls = {id: token for id, token in added.items() if control.fullmatch(token.content)}
        self._aliases = {token.content: f"\U000fffff{secret}.{id}." for id, token in controls.items()}
        self._inner.add_tokens(
            [
                AddedToken(
                    self._aliases[token.content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                    normalized=False,
                    special=False,
                )
                for token in controls.values()
            ]
        )
        self._ids = {self._inner.token_to_id(self._aliases[token.content]): id for id, token in controls.items()}

    def text(self, pieces: Iterable[tuple[str, bool]]) -> str:
        """Join the pieces of a text, (piece, whether it is written letters), with control tokens as their aliases."""
        return "".join(
            piece if literal else self._control.sub(lambda found: self._aliases[found[0]], piece)
            for piece, literal in pieces
        )

    @property
    def inner(self) -> tokenizers.Tokenizer:
        """The tokenizer of what `text` gives."""
        self._inner.encode_special_tokens = True  # each time, since a pickled tokenizer loses it
        return self._inner

    def ids(self, ids: list[int]) -> list[int]:
        """The ids of the tokenizer that was copied."""
        return [self._ids.get(id, id) for id in ids]
