"""The text as its own drafter: what followed the longest suffix of it that occurred before (suffix decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lmstate.speculation.drafter import Draft
from lmstate.speculation.suffix_automaton import Cursor, SuffixAutomaton

BETWEEN = -2  # no token: keeps a match in the corpus from running across two texts


class TextDrafter:
    """Drafts from each row's own text, and from a corpus of earlier texts where that matches longer.

    It has no weights and costs microseconds a token: wherever text repeats itself (code under edit, quotations, tables,
    agents that restate their input), it is right for many tokens on end.

    corpus   token ids of other texts (earlier answers, say); `remember` adds more
    """

    def __init__(self, corpus: Sequence[Sequence[int]] = ()) -> None:
        self._corpus = SuffixAutomaton()
        self._rows: dict[int, _Row] = {}
        for text in corpus:
            self.remember(text)

    def remember(self, text: Sequence[int]) -> None:
        """Add a text to the corpus."""
        for token in text:
            self._corpus.extend(token)
        self._corpus.extend(BETWEEN)

    def forget(self, row: int) -> None:
        """Drop a row's text: the row has ended, or begins anew."""
        self._rows.pop(row, None)

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        for row, tokens in zip(rows, accepted):
            if row not in self._rows:
                self._rows[row] = _Row(Cursor(self._corpus))
            self._rows[row].fresh += tokens

    def propose(self, rows: Sequence[int], depth: int) -> list[Draft]:
        return [self._propose(self._rows[row], depth) if row in self._rows else Draft() for row in rows]

    def _propose(self, row: _Row, depth: int) -> Draft:
        text, cursor = row.text, row.cursor
        remembers = bool(self._corpus.tokens)
        for token in row.fresh:
            text.extend(token)
            if remembers:
                cursor.push(token)
        row.fresh.clear()
        if cursor.match > text.match:
            tokens = self._corpus.tokens[cursor.source : cursor.source + depth]
            if BETWEEN in tokens:
                tokens = tokens[: tokens.index(BETWEEN)]
            match = cursor.match
        elif text.match:
            tokens = text.tokens[text.source : text.source + depth]
            while 0 < len(tokens) < depth:  # the match reaches the end of the text: it repeats from here on
                tokens += tokens[: depth - len(tokens)]
            match = text.match
        else:
            return Draft()
        return Draft(tuple(tokens), tuple(1 - 1 / (match + at + 1) for at in range(len(tokens))))


@dataclass
class _Row:
    """A row's text."""

    cursor: Cursor  # in the corpus
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    fresh: list[int] = field(default_factory=list)  # observed, not yet in the automaton
