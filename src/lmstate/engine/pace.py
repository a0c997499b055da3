"""Chunk size of prefill between two steps of the rows that decode."""

from __future__ import annotations

from collections.abc import Collection
from math import inf, sqrt

from lmstate.state.step import CHUNK
from lmstate.state.validate import real_number

LEAST, MOST, MULTIPLE = 8, CHUNK, 4  # tokens of a chunk
MAX_ITL, STALL = 80.0, 3.0  # default bounds: milliseconds, and times the usual gap
NEW = 0.3  # weight of the newest measurement of a decode step
NOISE, DRIFT = 0.05, 0.02  # of a chunk's seconds, and of the costs between two chunks: parts of them
FAR = 1000  # positions after which, as far as nothing is measured, what came before may cost as much as the token
LATE, SURE = 0.4, 0.2  # part of its time that a gap may take longer than planned: at first and at most, at least
FORGET = 0.9995  # what is left of it after a gap that did not: a bound is for the one in a thousand
ABRUPT = 0.5  # part of its seconds that one chunk may move the costs by: a hiccup of the machine tells nothing


class Pace:
    """Measured seconds of a decode step, and of a chunk of a prompt by its size and position.

    A chunk costs so much for the call, for each token, for each that the head reads, and for each position that a token
    looks back on: a Kalman filter of the four, which drift, as the load of the machine does.

    While a prompt is read, the gap between two tokens of a row that decodes is at most the larger of `max_itl` seconds
    and `stall` times the usual gap; None leaves one out.
    """

    def __init__(self, stall: float | None, max_itl: float | None = None) -> None:
        self.stall, self.max_itl = stall, max_itl
        self.decode: float | None = None
        self._last = 0.0  # seconds of the last decode step: rows that left make it shorter at once
        self._costs = [0.0] * 4
        self._prior: list[float] = []  # variances of the costs while nothing is known; empty: nothing was measured
        self._covariance: list[list[float]] = []
        self._late = LATE
        self._gap: tuple[float, float] | None = None  # (planned, taken) seconds of chunks, the next step is its rest
        self._joined = False  # a head was among them: a row joins the next step, which is another one then
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

    def decoded(self, seconds: float) -> None:
        if self._gap is not None and not self._joined and self.decode is not None:
            planned, taken = self._gap[0] + max(self.decode, self._last), self._gap[1] + seconds
            self._late = max(min(taken / planned - 1, LATE), FORGET * self._late)
        self._gap, self._joined = None, False
        self._last = seconds
        self.decode = seconds if self.decode is None else (1 - NEW) * self.decode + NEW * seconds

    def read(self, tokens: int, seconds: float, at: int, heads: int) -> None:
        """A chunk of `tokens` at a position took this long, the head over `heads` of them included."""
        x = _parts(tokens, at, heads)
        self._largest = max(self._largest, tokens)
        if not self._prior:
            token = seconds / tokens
            self._costs = [0.0, token, 0.0, 0.0]
            # At first every chunk has the head: what it may cost is the call's until one without it shows.
            self._prior = [seconds**2, token**2, (seconds / 4) ** 2, (token / FAR) ** 2]
            self._covariance = [[self._prior[i] * (i == j) for j in range(4)] for i in range(4)]
        expected = max(self._expected(tokens, at, heads), 1e-9)
        for i, most in enumerate(self._prior):
            self._covariance[i][i] = min(self._covariance[i][i] + DRIFT**2 * most, most)
        wrong = seconds - expected
        planned, taken = self._gap or (0.0, 0.0)
        self._gap = planned + expected, taken + seconds
        self._joined = self._joined or heads > 0
        along = [sum(row[j] * x[j] for j in range(4)) for row in self._covariance]
        variance = sum(x[i] * along[i] for i in range(4)) + (NOISE * expected) ** 2
        step = min(max(wrong, -ABRUPT * expected), ABRUPT * expected) / variance
        self._costs = [max(0.0, cost + part * step) for cost, part in zip(self._costs, along)]
        self._covariance = [
            [self._covariance[i][j] - along[i] * along[j] / variance for j in range(4)] for i in range(4)
        ]

    def _expected(self, tokens: int, at: int, heads: int) -> float:
        """Seconds of a chunk of so many tokens, as far as is known."""
        return sum(cost * part for cost, part in zip(self._costs, _parts(tokens, at, heads)))

    def seconds(self, tokens: int) -> float | None:
        """Estimated seconds to read so many tokens; None while nothing was measured."""
        call, token, _, position = self._costs
        return (call / MOST + token + position * tokens / 2) * tokens if self._prior else None

    def until_read(self, tokens: int, decoding: bool) -> float | None:
        """Estimated seconds until so many tokens are read, between steps of rows that decode; None: not known yet."""
        if not tokens:
            return 0.0
        if (seconds := self.seconds(tokens)) is None or not decoding or not self.decode:
            return seconds
        return seconds * (1 + self.decode / max(self._time((None,)), self._expected(LEAST, 0, 1), 1e-6))

    def chunk(
        self, decoding: bool, at: int, left: int, itls: Collection[float | None] = (None,), spent: float = 0.0
    ) -> int:
        """Number of tokens to read now, at a position of their text; the head reads the last of the `left` ones.

        itls   seconds that the gaps of the rows that decode may have; None: this pace's bound
        spent  seconds since the last step of these rows, which read other prompts
        """
        if not decoding:
            return min(MOST, left)
        time = self._time(itls) - spent
        size = self._fitting(time, at)
        if size >= left:
            size = self._fitting(time - self._costs[2], at)
        return min(size, left)

    def leaves_time(self, itls: Collection[float | None], spent: float) -> bool:
        """Whether one more chunk fits in the gap of the rows that decode: arguments as of `chunk`."""
        return self._time(itls) - spent >= self._expected(LEAST, 0, 1)

    def _time(self, itls: Collection[float | None]) -> float:
        """Seconds for reading prompts between two steps of rows with these bounds."""
        usual = sorted((self.decode or 0.0, self._last))
        bound = max(self.max_itl or 0.0, (self.stall or 0.0) * usual[0])
        gap = min(bound if itl is None else itl for itl in itls)
        # The whole gap is what may turn out longer: the decode step behind the chunk, too.
        return gap / (1 + max(self._late, SURE)) - usual[1]

    def _fitting(self, time: float, at: int) -> int:
        """The largest chunk that takes no longer, or the least one. Never far beyond what was measured."""
        call, token, _, position = self._costs
        time, token, most = max(0.0, time - call), token + position * at, min(MOST, 2 * self._largest)
        slope = token + sqrt(token**2 + 2 * position * time)
        size = 2 * time / slope if slope * most > 2 * time else most
        return max(LEAST, int(size) // MULTIPLE * MULTIPLE)


def _parts(tokens: int, at: int, heads: int) -> tuple[float, float, float, float]:
    """Numbers of calls, tokens, tokens with the head, and positions looked back on of a chunk."""
    return 1.0, float(tokens), float(heads), tokens * (at + tokens / 2)
