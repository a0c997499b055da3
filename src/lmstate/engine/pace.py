"""Sizes of the chunks of prompts that a step reads beside the rows that decode."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf, sqrt
from typing import NamedTuple

from lmstate.state.step import CHUNK
from lmstate.state.validate import real_number

LEAST, MOST, MULTIPLE = 8, CHUNK, 4  # tokens of a chunk
MAX_ITL, STALL = 80.0, 3.0  # default bounds: milliseconds, and times the usual gap
NEW = 0.3  # weight of the newest measurement of a decode step
FRESH = 8  # steps with chunks in which others rows are learned, and in which what is known of rows still holds
NOISE, DRIFT = 0.05, 0.02  # of a chunk's seconds, and of the costs between two chunks: parts of them
FAR = 1000  # positions after which, as far as nothing is measured, what came before may cost as much as the token
LATE = 0.3, 0.1, 0.4  # part of its time that a gap may take longer than planned: at first, at least, at most
BEYOND, LEARN = 0.01, 0.1  # part of the gaps that may take longer still; how much one of those moves it
ABRUPT = 0.5  # part of its seconds that one chunk may move the costs by: a hiccup of the machine tells nothing


class Pace:
    """Measured seconds of a step of rows that decode, and of the chunks of prompts that it reads by their sizes and
    positions.

    A chunk has a cost for the call (beside rows that decode, or alone), for each token, for each token that the head
    reads, and for each position that a token looks back on. A Kalman filter follows these, because they drift with the
    load of the machine.

    While prompts are read, the gap between two tokens of a row that decodes is at most the larger of `max_itl` seconds
    and `stall` times the usual gap; None leaves one out.
    """

    def __init__(self, stall: float | None, max_itl: float | None = None) -> None:
        self.stall, self.max_itl = stall, max_itl
        self.decode: float | None = None
        self._last = 0.0  # seconds of the last step without chunks, of as many rows as there are; 0: none was yet
        self._rows = 0  # that decoded in the last step
        self._since = 0  # steps with chunks since these rows were known; below 0: they are not yet
        self._costs = [0.0] * len(ChunkParts._fields)
        self._prior: list[float] = []  # variances of the costs while nothing is known; empty: nothing was measured
        self._covariance: list[list[float]] = []
        self.late = LATE[0]
        self._largest = LEAST

    @staticmethod
    def bounded(max_itl: float | None, stall: float | None) -> Pace:
        """A pace with bounds as `Engine` takes them: milliseconds, and a multiple; with neither, the default ones.

        Raises ValueError for bounds out of range.
        """
        if max_itl is None and stall is None:
            max_itl, stall = MAX_ITL, STALL
        if stall is not None and not real_number(stall, "stall") > 1.0:
            raise ValueError(f"stall={stall} was asked for; it is above 1: times the usual gap between two tokens")
        if max_itl is not None and not 0.0 < real_number(max_itl, "max_itl") < inf:
            raise ValueError(f"max_itl={max_itl} was asked for; it is above 0: milliseconds between two tokens")
        return Pace(stall, None if max_itl is None else max_itl / 1000)

    def decoded(self, seconds: float, rows: int) -> None:
        """Note the seconds of a step in which `rows` rows decode, without chunks."""
        self._last, self._since, self._rows = seconds, 0, rows
        self.decode = seconds if self.decode is None else (1 - NEW) * self.decode + NEW * seconds

    def read(
        self, seconds: float, chunks: Collection[tuple[int, int]], heads: int, rows: int, *, apart: bool = False
    ) -> float:
        """A step that read these chunks, (tokens, position) each, took this long, the head over `heads` of their tokens
        included, beside `rows` rows that decode, or before them (`apart`). Returns the part of the seconds that these
        took."""
        decoding = rows > 0 and not apart
        x = ChunkParts.of(chunks, heads, rows > 0)
        self._largest = max(self._largest, int(x.tokens))
        if decoding and self.decode is None:  # what is known of chunks is not theirs
            self.decode = max(seconds - self._expected(x), 0.1 * seconds)
        usual = self.decode if decoding and self.decode is not None else 0.0
        if not self._prior:
            token = max(seconds - usual, 0.1 * seconds) / x.tokens
            self._costs = [0.0, 0.0, token, 0.0, 0.0]
            # At first every chunk has the head: what it may cost is the call's until one without it shows.
            self._prior = [seconds**2, seconds**2, token**2, (seconds / 4) ** 2, (token / FAR) ** 2]
            self._covariance = [[most * (i == j) for j in range(len(x))] for i, most in enumerate(self._prior)]
        expected = max(self._expected(x), 1e-9)
        for i, most in enumerate(self._prior):
            self._covariance[i][i] = min(self._covariance[i][i] + DRIFT**2 * most, most)
        wrong = seconds - usual - expected
        if decoding:
            planned = max(usual, self._last) + expected
            beyond = seconds > planned * (1 + self.late)
            self.late = min(max(self.late + LEARN * (beyond - BEYOND), LATE[1]), LATE[2])
            if rows != self._rows:
                self._rows, self._since, self._last = rows, -FRESH, 0.0
            self._since += 1
            # Rows that came or left show here alone; once they are known chunks do; later, each part may have changed.
            share = 1.0 if self._since <= 0 else 0.0 if self._since <= FRESH else usual / (usual + expected)
            self.decode = usual + NEW * share * max(-ABRUPT * usual, min(wrong, ABRUPT * usual))
            wrong *= 1 - share
        along = [sum(a * b for a, b in zip(row, x)) for row in self._covariance]
        variance = sum(a * b for a, b in zip(along, x)) + (NOISE * (usual + expected)) ** 2
        step = min(max(wrong, -ABRUPT * expected), ABRUPT * expected) / variance
        self._costs = [max(0.0, cost + part * step) for cost, part in zip(self._costs, along)]
        self._covariance = [
            [each - along[i] * along[j] / variance for j, each in enumerate(row)]
            for i, row in enumerate(self._covariance)
        ]
        return seconds * usual / (usual + expected)

    def _expected(self, x: ChunkParts) -> float:
        """Seconds of chunks, as far as is known."""
        return sum(cost * part for cost, part in zip(self._costs, x))

    def seconds(self, tokens: int) -> float | None:
        """Estimated seconds to read `tokens` tokens; None while nothing was measured."""
        cost = ChunkParts(*self._costs)
        return (cost.alone / MOST + cost.tokens + cost.positions * tokens / 2) * tokens if self._prior else None

    def until_read(self, tokens: int, decoding: bool) -> float | None:
        """Estimated seconds until `tokens` tokens are read, beside rows that decode; None if not known yet."""
        if not tokens:
            return 0.0
        if (seconds := self.seconds(tokens)) is None or not decoding or not self.decode:
            return seconds
        return seconds * (1 + self.decode / max(self._time((None,)), self._least(0), 1e-6))

    def chunks(
        self, texts: Sequence[tuple[int, int]], decoding: bool, itls: Collection[float | None] = (None,)
    ) -> list[int]:
        """Number of tokens to read in the next step of each of the first of these texts.

        texts  (position, tokens left) of each, those whose turn it is first; the head reads the last of a text
        itls   seconds that the gaps of the rows that decode may have; None: this pace's bound
        """
        cost, sizes, room = ChunkParts(*self._costs), list[int](), MOST
        time = self._time(itls) - cost.beside if decoding else inf
        for at, left in texts:
            if sizes and (room < LEAST or time < self._least(at)):
                break
            size = self._fitting(time, at)
            if size >= left:
                size = self._fitting(time - cost.heads, at)
            size = min(size, left, room)
            sizes.append(size)
            room -= size
            time -= size * (cost.tokens + cost.positions * (at + size / 2)) + cost.heads * (size == left)
        return sizes

    def _least(self, at: int) -> float:
        """Seconds of the smallest chunk at a position of a text, beside others."""
        cost = ChunkParts(*self._costs)
        return LEAST * (cost.tokens + cost.positions * (at + LEAST / 2)) + cost.heads

    def _time(self, itls: Collection[float | None]) -> float:
        """Seconds for reading prompts in a step of rows with these bounds."""
        usual = sorted((self.decode or 0.0, self._last or self.decode or 0.0))
        bound = max(self.max_itl or 0.0, (self.stall or 0.0) * usual[0])
        gap = min(bound if itl is None else itl for itl in itls)
        # The whole gap may turn out longer, also the part of the rows that decode beside the chunks.
        return gap / (1 + self.late) - usual[1]

    def _fitting(self, time: float, at: int) -> int:
        """The largest chunk that takes no longer, or the least one. Never far beyond what was measured."""
        if time == inf:
            return MOST
        cost, time = ChunkParts(*self._costs), max(0.0, time)
        token, most = cost.tokens + cost.positions * at, min(MOST, 2 * self._largest)
        slope = token + sqrt(token**2 + 2 * cost.positions * time)
        size = 2 * time / slope if slope * most > 2 * time else most
        return max(LEAST, int(size) // MULTIPLE * MULTIPLE)


class ChunkParts(NamedTuple):
    """Parts of the work that the chunks of a step are, in numbers of each; or the seconds that one of each takes."""

    alone: float  # a call of chunks alone
    beside: float  # chunks beside rows that decode
    tokens: float
    heads: float  # tokens with the head
    positions: float  # that their tokens look back on

    @staticmethod
    def of(chunks: Collection[tuple[int, int]], heads: int, decoding: bool) -> ChunkParts:
        tokens = sum(size for size, _ in chunks)
        looked_at = sum(size * (at + size / 2) for size, at in chunks)
        return ChunkParts(float(not decoding), float(decoding), float(tokens), float(heads), looked_at)
