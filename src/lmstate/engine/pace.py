"""Chunk size of prefill between two steps of the rows that decode."""

from __future__ import annotations

SIZES = (8, 16, 32, 64, 128, 256, 512)
NEW = 0.3  # weight of the newest measurement
MARGIN = 0.7  # of the time there is, which is planned with: chunks take longer the farther into a prompt they are


class Pace:
    """Measured seconds of a decode step, and of a chunk of a prompt by its size.

    `stall`: a token of a row that decodes may come this many times later than without prompts being read.
    """

    def __init__(self, stall: float) -> None:
        self.stall = stall
        self.decode: float | None = None
        self._chunks: dict[int, float] = {}

    def decoded(self, seconds: float) -> None:
        self.decode = seconds if self.decode is None else (1 - NEW) * self.decode + NEW * seconds

    def read(self, tokens: int, seconds: float) -> None:
        """A chunk of `tokens` took this long."""
        size = next((size for size in SIZES if tokens <= size), SIZES[-1])
        if tokens * 2 > size:  # a chunk much smaller than its class says little about it
            known = self._chunks.get(size)
            self._chunks[size] = seconds if known is None else (1 - NEW) * known + NEW * seconds

    def seconds(self, tokens: int) -> float | None:
        """Estimated seconds to read so many tokens; None while nothing was measured."""
        if not self._chunks:
            return None
        size = max(self._chunks)
        return self._chunks[size] / size * tokens

    def chunk(self, decoding: bool) -> int:
        """Number of tokens to read now."""
        if not decoding:
            return SIZES[-1]
        spare = MARGIN * (self.stall - 1) * (self.decode or 0.0)
        fitting = SIZES[0]
        for size in SIZES[1:]:
            cost = self._chunks.get(size)
            if cost is None:  # not measured: not more than twice what was, if even a dearer token would fit
                smaller = self._chunks.get(size // 2)
                cost = None if smaller is None else 2 * smaller
            if cost is None:
                larger = [(other, seconds) for other, seconds in self._chunks.items() if other > size]
                cost = min(larger)[1] if larger else None
            if cost is None or cost > spare:
                break
            fitting = size
        return fitting
