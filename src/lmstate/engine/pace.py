"""Chunk size of prefill between two steps of the rows that decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SIZES = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
NEW = 0.3  # weight of the newest measurement
MARGIN = 0.7  # of the time there is, which is planned with: no two chunks take quite the same
APART = 256  # positions between two measurements that tell what a position costs


@dataclass(frozen=True)
class _Measured:
    seconds: float
    at: float  # position in its text


class Pace:
    """Measured seconds of a decode step, and of a chunk of a prompt by its size and position.

    `stall`: a token of a row that decodes may come this many times later than without prompts being read.
    """

    def __init__(self, stall: float) -> None:
        self.stall = stall
        self.decode: float | None = None
        self._last = 0.0  # seconds of the last decode step: rows that left make it shorter at once
        self._chunks: dict[int, _Measured] = {}
        self._before: dict[int, _Measured] = {}  # some way before in the text
        self._position = 0.0  # seconds a token and position: attention reads all that came before

    def decoded(self, seconds: float) -> None:
        self._last = seconds
        self.decode = seconds if self.decode is None else (1 - NEW) * self.decode + NEW * seconds

    def read(self, tokens: int, seconds: float, at: int) -> None:
        """A chunk of `tokens` at a position took this long."""
        size = next((size for size in SIZES if tokens <= size), SIZES[-1])
        if tokens * 2 <= size:  # a chunk much smaller than its class says little about it
            return
        seconds *= size / tokens
        before = self._before.get(size)
        if before is not None and at - before.at >= APART:
            growth = max(0.0, (seconds - before.seconds) / (size * (at - before.at)))
            self._position = (1 - NEW) * self._position + NEW * growth
        if before is None or not 0 <= at - before.at < APART:
            self._before[size] = _Measured(seconds, at)
        if (known := self._chunks.get(size)) is not None:
            seconds = (1 - NEW) * self._at(known, size, at) + NEW * seconds
        self._chunks[size] = _Measured(seconds, at)

    def seconds(self, tokens: int) -> float | None:
        """Estimated seconds to read so many tokens; None while nothing was measured."""
        if not self._chunks:
            return None
        size = max(self._chunks)
        return self._at(self._chunks[size], size, tokens / 2) / size * tokens

    def chunk(self, decoding: bool, at: int) -> int:
        """Number of tokens to read now, at a position of their text."""
        if not decoding:
            return SIZES[-1]
        spare = MARGIN * (self.stall - 1) * min(self.decode or 0.0, self._last)
        costs = {size: self._at(known, size, at) for size, known in self._chunks.items()}
        fitting = SIZES[0]
        for size in SIZES[1:]:
            cost = _between(costs, size)
            if cost is None or cost > spare:
                break
            fitting = size
        return fitting

    def _at(self, known: _Measured, size: int, at: float) -> float:
        """Seconds of a chunk that was measured elsewhere; what is farther back is no dearer than measured."""
        return max(known.seconds + self._position * size * (at - known.at), 0.5 * known.seconds)


def _between(costs: Mapping[int, float], size: int) -> float | None:
    """Seconds of a size, from those of the sizes around it where it was not measured; None where nothing was."""
    below = max((other for other in costs if other <= size), default=None)
    above = min((other for other in costs if other >= size), default=None)
    if above is None:
        return None if below is None else costs[below] * size / below
    if below is None or below == above:
        return costs[above]
    return costs[below] + (costs[above] - costs[below]) * (size - below) / (above - below)
