"""A model with another tokenizer as the drafter: text goes over as text, and comes back as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmstate.language_model import LanguageModel
from lmstate.speculation.drafter import Draft
from lmstate.speculation.model_drafter import ModelDrafter

OPEN = 8  # drafter's tokens at the end of a text that more text may still change
CONTEXT = 4  # tokens before a draft that its own depend on
TOKENS_RATIO = 2  # drafter's tokens asked for each one of the model's, at most


class TranslatedDrafter:
    """Universal assisted decoding: what a smaller model of another vocabulary would say, in the tokens of this one.

    Tokens without text (special ones) are left out of what the drafter reads; what it cannot draft costs speed alone.
    """

    def __init__(self, model: LanguageModel, tokenizer: Any, rows: int, reading: int | None = None) -> None:
        """`tokenizer`: that of the model that verifies; `reading` as in `ModelDrafter`."""
        self._own = model.tokenizer
        self._tokenizer = tokenizer
        self._drafter = ModelDrafter(model, rows, model.config.vocab_size, reading=reading)
        self._tails: list[list[int]] = [[] for _ in range(rows)]  # of the row's tokens, in the model's ids
        self._streams = [tokenizer.stream() for _ in range(rows)]
        self._read: list[list[int]] = [[] for _ in range(rows)]  # the row's text in the drafter's ids
        self._open: list[str] = ["" for _ in range(rows)]  # text of the last of these, which may be cut differently
        self._closed: list[int] = [0] * rows  # how many of them will not change

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        for row, tokens in zip(rows, accepted):
            self._tails[row] = [*self._tails[row], *tokens][-CONTEXT:]
            self._extend(row, "".join(map(self._streams[row].push, tokens)))

    def forget(self, row: int) -> None:
        """The row has ended: its next text may be another one."""
        self._tails[row], self._read[row], self._open[row], self._closed[row] = [], [], "", 0
        self._streams[row] = self._tokenizer.stream()
        self._drafter.forget(row)

    def propose(self, rows: Sequence[int], depth: int) -> list[Draft]:
        asked = [row for row in rows if self._read[row]]
        drafts = dict(zip(asked, self._drafter.propose(asked, TOKENS_RATIO * depth))) if asked else {}
        return [self._translate(row, drafts[row], depth) if row in drafts else Draft() for row in rows]

    def _extend(self, row: int, text: str) -> None:
        if not text:
            return
        closed = self._closed[row]
        open_text = self._open[row] + text
        ids = self._own.encode(open_text, add_special_tokens=not closed)
        self._drafter.replace_text(row, closed, ids)
        self._read[row][closed:] = ids
        self._open[row] = open_text
        # Close all but the last tokens, where cutting the text there gives the same tokens again.
        last = ids[-OPEN:]
        rest = self._own.decode(last)
        closes = len(ids) > 2 * OPEN and rest and open_text.endswith(rest)
        if closes and self._own.encode(rest, add_special_tokens=False) == last:
            self._closed[row] = closed + len(ids) - len(last)
            self._open[row] = rest

    def _translate(self, row: int, draft: Draft, depth: int) -> Draft:
        """The draft in the model's tokens, cut where they would follow the row's own."""
        if not draft.tokens:
            return Draft()
        context = self._read[row][-CONTEXT:]
        before = self._own.decode(context)
        text = self._own.decode([*context, *draft.tokens])
        if not text.startswith(before):
            return Draft()
        text = text[len(before) :]
        tail = self._tails[row]
        seen = self._tokenizer.decode(tail)
        before_ids = self._tokenizer.encode(seen, add_special_tokens=False)
        ids = self._tokenizer.encode(seen + text, add_special_tokens=False)
        if ids[: len(before_ids)] != before_ids:
            return Draft()
        ids = ids[len(before_ids) :]
        whole = ids[:-1] or ids  # more text may change the last token
        return Draft(tuple(whole[:depth]))
