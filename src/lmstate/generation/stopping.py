"""Stop strings in a stream of text pieces, wherever the pieces are cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def as_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The `stop` argument of `generate` as a tuple; a bare string is one stop string."""
    if not isinstance(stop, Iterable | None):
        raise ValueError(f"stop is {stop!r:.80}; it must be a text, or a list of texts")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop has {text!r}; every stop string must be a text of at least one character")
    return stops


class StopScanner:
    """Lets text through up to the first stop string, holding back only what may still turn into one.

    `include` lets that stop string through too.

    It works character by character (Knuth-Morris-Pratt, one automaton a stop string), so how the text is cut into
    pieces cannot matter. The first stop string to be complete wins; of several that end together, the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops = tuple(stops)
        self._include = include
        self.found: str | None = None  # the stop string that ended the text
        self.cut: int | None = None  # where it cuts the text, in characters since the beginning; None: not seen
        self._fallbacks = [_fallback(text) for text in self.stops]
        self._matched = [0] * len(self.stops)  # how much of each stop string the end of the text matches
        self._held = ""  # the end of the text, not yet let through
        self._scanned = 0  # characters since the beginning

    @property
    def certain(self) -> int:
        """Number of characters that were let through, where there are stop strings."""
        return self._scanned - len(self._held) if self.cut is None else self.cut

    def push(self, piece: str, may_end: bool = True) -> str:
        """Add text; returns what is now certain to be let through.

        Unless it `may_end` in this piece, stop strings that are complete in it are text like any other.
        """
        if not self.stops:
            return piece
        if self.cut is not None:
            return ""
        text = self._held + piece
        begin = self._scanned - len(self._held)  # the position of text[0]
        for character in piece:
            self._scanned += 1
            found = self._advance(character)
            if found and may_end:
                self.found, self.cut = found, self._scanned - (0 if self._include else len(found))
                self._held = ""
                return text[: self.cut - begin]
        keep = max(self._matched)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text ends here: returns what was held back."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self.stops)
        return held

    def _advance(self, character: str) -> str:
        """One character for every automaton. Returns the longest stop string that it completes, or an empty text."""
        found = ""
        for index, (stop, fallback) in enumerate(zip(self.stops, self._fallbacks)):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = fallback[matched]
            if stop[matched] == character:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                found = max(found, stop, key=len)
                self._matched[index] = fallback[matched]  # where it ends nothing
        return found


def _fallback(stop: str) -> list[int]:
    """fallback[n]: the length of the longest proper prefix of `stop` that also ends stop[:n]."""
    fallback = [0, 0]
    matched = 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = fallback[matched]
        if stop[matched] == character:
            matched += 1
        fallback.append(matched)
    return fallback
