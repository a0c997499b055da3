"""Earlier texts that drafts are looked up in, the oldest forgotten first."""

from __future__ import annotations

from collections.abc import Sequence

from lmstate.speculation.suffix_automaton import Cursor, SuffixAutomaton

BETWEEN = -2  # no token: keeps a match from running across two texts


class TextCorpus:
    """Suffix automata of at most `most` tokens in all, about 200 bytes each.

    An automaton cannot forget, so there are two: tokens go into one of them, and once that holds half of what there may
    be, it takes the place of the older one.
    """

    def __init__(self, most: int | None = None) -> None:
        """`most`: None for any number of tokens."""
        self._most = most
        self._young, self._old = SuffixAutomaton(), SuffixAutomaton()
        self._fresh: list[int] = []  # not yet in an automaton

    def __len__(self) -> int:
        """Tokens that it holds."""
        return len(self._young.tokens) + len(self._old.tokens) + len(self._fresh)

    def remember(self, text: Sequence[int]) -> None:
        """Add a text. `read` makes it found."""
        self._fresh += [*text, BETWEEN]
        if self._most is not None:
            del self._fresh[: max(0, len(self._fresh) - self._most // 2)]

    def read(self, count: int | None = None) -> None:
        """Take up the next `count` tokens of what was added; None: all of them."""
        for token in self._fresh[:count]:
            if self._most is not None and 4 * len(self._young.tokens) >= self._most:
                self._young, self._old = SuffixAutomaton(), self._young
            self._young.extend(token)
        del self._fresh[:count]

    def cursors(self, held: Sequence[Cursor]) -> list[Cursor]:
        """One for each automaton that has any text: those of `held` that still are in one, else new ones."""
        known = {id(cursor.automaton): cursor for cursor in held}
        automata = [each for each in (self._young, self._old) if each.tokens]
        return [known.get(id(each)) or Cursor(each) for each in automata]


def continuation(cursor: Cursor, most: int) -> list[int]:
    """The at most `most` tokens that followed a cursor's match, up to the end of their text."""
    tokens = cursor.automaton.tokens[cursor.source : cursor.source + most]
    return tokens[: tokens.index(BETWEEN)] if BETWEEN in tokens else tokens
