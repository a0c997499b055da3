"""Choice of draft depth: measured costs of a step by its width, measured acceptance, and the depth that pays most."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lmstate.speculation.drafter import Draft

FORGET = 256  # steps after which a cost that was not seen again is looked for anew
GAIN = 1.03  # drafting must promise this much over plain decoding
SLOPE = 0.1  # of a plain step, for each more token of a row: assumed until two widths were measured
LEVELS = 12
TRUST = 4.0  # trials that a drafter's own confidence counts for
MEMORY = 64.0  # trials over which acceptance is averaged


class StepCosts:
    """Seconds of a step by its width, the tokens of the row that has the most."""

    def __init__(self, rows: int = 1) -> None:
        self._slope = min(1.0, SLOPE * rows)  # many rows fill a processor with one token each
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._steps = 0

    def measured(self, width: int, seconds: float) -> None:
        self._steps += 1
        old = self._seconds.get(width)
        # Fast down and slow up: what else runs on the machine can only add.
        weight = 1.0 if old is None else 0.5 if seconds < old else 0.1
        self._seconds[width] = seconds if old is None else old + weight * (seconds - old)
        self._seen[width] = self._steps
        stale = [known for known, seen in self._seen.items() if self._steps - seen > FORGET]
        for known in stale:
            del self._seconds[known], self._seen[known]

    def __contains__(self, width: int) -> bool:
        return width in self._seconds

    def __call__(self, width: int) -> float:
        """Seconds of a step of this width, between and beyond measured ones along a line. Needs width 1."""
        if width in self._seconds:
            return self._seconds[width]
        below = max(known for known in self._seconds if known < width)
        above = min((known for known in self._seconds if known > width), default=None)
        low = self._seconds[below]
        if above is not None:
            return low + (self._seconds[above] - low) * (width - below) / (above - below)
        slope = self._slope * low if below == 1 else max(0.0, (low - self._seconds[1]) / (below - 1))
        return low + slope * (width - below)


class Acceptance:
    """Conditional acceptance rate of a drafted token, by the drafter's confidence in it."""

    def __init__(self) -> None:
        self._trials: dict[tuple[str, int], float] = {}
        self._held: dict[tuple[str, int], float] = {}

    def rates(self, draft: Draft) -> list[float]:
        """For each token of a draft, the probability that it holds if those before it do."""
        rates: list[float] = []
        for at in range(len(draft)):
            level = _level(draft, at)
            # Before anything was counted: what the drafter says, or else what held for the place before.
            prior = draft.confidence[at] if draft.confidence is not None else rates[-1] if rates else 0.5
            trials, held = self._trials.get(level, 0.0), self._held.get(level, 0.0)
            rates.append((held + TRUST * prior) / (trials + TRUST))
        return rates

    def compare(self, draft: Draft, actual: Sequence[int]) -> int:
        """Learn from how a row really went on; returns how many tokens of the draft were right."""
        for at, (drafted, token) in enumerate(zip(draft.tokens, actual)):
            level = _level(draft, at)
            trials, held = self._trials.get(level, 0.0), self._held.get(level, 0.0)
            keep = min(1.0, MEMORY / (trials + 1))
            right = drafted == token
            self._trials[level] = (trials + 1) * keep
            self._held[level] = (held + right) * keep
            if not right:
                return at
        return min(len(draft), len(actual))


def _level(draft: Draft, at: int) -> tuple[str, int]:
    """The class that a token's acceptance is counted in: by its place, or by half powers of two of the doubt in it."""
    if draft.confidence is None:
        return "place", at
    doubt = min(1.0, max(1.0 - draft.confidence[at], 2.0 ** (-LEVELS / 2)))
    return "confidence", int(-2 * math.log2(doubt))


def expected(rates: Sequence[float], depth: int) -> float:
    """Drafted tokens that hold, of the first `depth`."""
    reached, total = 1.0, 0.0
    for rate in rates[:depth]:
        reached *= rate
        total += reached
    return total


def best_depth(rows: Sequence[Sequence[float]], costs: StepCosts, most: int, drafting: Sequence[float]) -> int:
    """The depth that gives the most tokens a second, 0 where none gives more than plain decoding.

    rows: each row's rates of acceptance; drafting: seconds that drafting to depth 0, 1, ... takes from now on.
    """
    best, depth = len(rows) / costs(1) * GAIN, 0
    for candidate in range(1, most + 1):
        tokens = sum(1 + expected(rates, candidate) for rates in rows)
        speed = tokens / (costs(1 + candidate) + drafting[candidate])
        if speed > best:
            best, depth = speed, candidate
    return depth
