"""The text as its own drafter: what followed the longest suffix of it that occurred before (suffix decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lmstate.speculation.drafter import Draft
from lmstate.speculation.suffix_automaton import Cursor, SuffixAutomaton
from lmstate.speculation.text_corpus import TextCorpus, continuation


class TextDrafter:
    """Drafts from each row's own text, and from a corpus of earlier texts where that matches longer.

    It has no weights and costs microseconds a token: wherever text repeats itself (code under edit, quotations, tables,
    agents that restate their input), it is right for many tokens on end.

    corpus   token ids of other texts (earlier answers, say), or a `TextCorpus`; `remember` adds more
    reading  tokens of a row's text, and of the corpus, that a proposal reads at most: a row drafts nothing until all of
             its text is read
    """

    def __init__(self, corpus: Sequence[Sequence[int]] | TextCorpus = (), reading: int | None = None) -> None:
        self._corpus = corpus if isinstance(corpus, TextCorpus) else TextCorpus()
        self._reading = reading
        self._rows: dict[int, _Row] = {}
        if not isinstance(corpus, TextCorpus):
            for text in corpus:
                self.remember(text)

    def remember(self, text: Sequence[int]) -> None:
        """Add a text to the corpus."""
        self._corpus.remember(text)

    def forget(self, row: int) -> None:
        """Drop a row's text: the row has ended, or begins again."""
        self._rows.pop(row, None)

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        for row, tokens in zip(rows, accepted):
            if row not in self._rows:
                self._rows[row] = _Row()
            self._rows[row].fresh += tokens

    def propose(self, rows: Sequence[int], depth: int) -> list[Draft]:
        self._corpus.read(self._reading)
        return [self._propose(self._rows[row], depth) if row in self._rows else Draft() for row in rows]

    def _propose(self, row: _Row, depth: int) -> Draft:
        text = row.text
        row.cursors = self._corpus.cursors(row.cursors)
        count = len(row.fresh) if self._reading is None else min(len(row.fresh), self._reading)
        for token in row.fresh[:count]:
            text.extend(token)
            for cursor in row.cursors:
                cursor.push(token)
        del row.fresh[:count]
        if row.fresh:
            return Draft()
        best = max(row.cursors, key=lambda cursor: cursor.match, default=None)
        if best is not None and best.match > text.match:
            tokens, match = continuation(best, depth), best.match
        elif text.match:
            tokens, match = text.tokens[text.source : text.source + depth], text.match
            while 0 < len(tokens) < depth:  # the match reaches the end of the text: it repeats from here on
                tokens += tokens[: depth - len(tokens)]
        else:
            return Draft()
        return Draft(tuple(tokens), tuple(1 - 1 / (match + at + 1) for at in range(len(tokens))))


@dataclass
class _Row:
    """A row's text."""

    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    cursors: list[Cursor] = field(default_factory=list)  # in the corpus
    fresh: list[int] = field(default_factory=list)  # observed, not yet in the automaton
