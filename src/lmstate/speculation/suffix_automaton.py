"""Suffix automaton of a growing sequence of token ids (Blumer et al. 1985), and a cursor that matches against one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

RECENT = 8  # suffixes whose latest occurrence is brought up to date at each token, longest first


class SuffixAutomaton:
    """Every substring of `tokens`, in amortized constant time and at most two states a token.

    `match` is the length of the longest suffix of `tokens` that occurred before, and `source` the position after its
    latest known earlier occurrence: `tokens[source]` followed it there.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.match = 0
        self.source = 0
        # Per state. Most states have one transition, which is in `_token` and `_next`; `_more` has the others.
        self._length = array("q", [0])
        self._link = array("q", [-1])
        self._token = array("q", [-1])
        self._next = array("q", [-1])
        self._end = array("q", [0])  # the position after an occurrence
        self._more: dict[int, dict[int, int]] = {}
        self._last = 0
        for token in tokens:
            self.extend(token)

    def extend(self, token: int) -> None:
        """Append a token."""
        tokens, length, link = self.tokens, self._length, self._link
        first, following, more = self._token, self._next, self._more
        tokens.append(token)
        end = len(tokens)
        new = self._new_state(end, 0, end)
        state = self._last
        self._last = new
        target = -1
        while state != -1:
            if first[state] == token:
                target = following[state]
            elif first[state] == -1:
                first[state], following[state] = token, new
                state = link[state]
                continue
            elif state in more and token in more[state]:
                target = more[state][token]
            else:
                more.setdefault(state, {})[token] = new
                state = link[state]
                continue
            break
        if state == -1:
            link[new] = 0
        elif length[target] == length[state] + 1:
            link[new] = target
        else:
            link[new] = self._split(state, token, target)
            link[target] = link[new]
        self.match = length[link[new]]
        self.source = self._end[link[new]]
        self._touch(link[new], end)

    def follow(self, state: int, token: int) -> int:
        """The state that a token leads to, -1 if there is none."""
        if self._token[state] == token:
            return self._next[state]
        return self._more.get(state, {}).get(token, -1)

    def shorter(self, state: int) -> int:
        """The state of the longest suffix that occurs elsewhere too, -1 at the root."""
        return self._link[state]

    def longest(self, state: int) -> int:
        """The length of the longest substring of a state."""
        return self._length[state]

    def after(self, state: int) -> int:
        """The position after the latest known occurrence of a state's substrings."""
        return self._end[state]

    def _new_state(self, length: int, link: int, end: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._token.append(-1)
        self._next.append(-1)
        self._end.append(end)
        return len(self._length) - 1

    def _split(self, state: int, token: int, target: int) -> int:
        """Part the shorter substrings of `target` from it; returns the state that they get."""
        clone = self._new_state(self._length[state] + 1, self._link[target], self._end[target])
        self._token[clone], self._next[clone] = self._token[target], self._next[target]
        if target in self._more:
            self._more[clone] = dict(self._more[target])
        while state != -1 and self.follow(state, token) == target:
            if self._token[state] == token:
                self._next[state] = clone
            else:
                self._more[state][token] = clone
            state = self._link[state]
        return clone

    def _touch(self, state: int, end: int) -> None:
        for _ in range(RECENT):
            if state <= 0:
                return
            self._end[state] = end
            state = self._link[state]


class Cursor:
    """The longest suffix of a sequence that occurs in another one's automaton, token by token (matching statistics)."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.match = 0
        self._state = 0

    def push(self, token: int) -> None:
        """Append a token to the sequence; amortized constant time."""
        automaton = self.automaton
        while (following := automaton.follow(self._state, token)) == -1:
            self._state = automaton.shorter(self._state)
            if self._state == -1:
                self._state = self.match = 0
                return
            self.match = min(self.match, automaton.longest(self._state))  # the automaton may have grown
        self._state = following
        self.match += 1

    @property
    def source(self) -> int:
        """The position in the automaton's tokens after the match."""
        return self.automaton.after(self._state)
