"""Choice of draft depth: measured costs of a step by its width, measured acceptance, and the depth that pays most."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lmstate.speculation.drafter import Draft

FORGET = 256  # steps after which a cost that was not seen again is looked for anew
REFRESH = 32  # steps after which plain decoding is measured again: both costs are to be of the same load of the machine
CREDIT, CREDIT_STEP = 1.0, 0.02  # plain steps that a row may lose to its neighbors: at first, and more at each step
UNLIKELY = 0.02  # a token that is reached with no more probability ends the search for a deeper depth
GAIN = 1.03  # drafting must promise this much over plain decoding
SLOPE = 0.1  # of a plain step, for each more token of one row: assumed until two widths were measured
LEVELS = 12
TRUST = 4.0  # trials that a drafter's own confidence counts for
MEMORY = 64.0  # trials over which acceptance is averaged


class StepCosts:
    """Seconds of a step by its width, the tokens of the row that has the most."""

    def __init__(self, rows: int = 1) -> None:
        # Many rows fill a processor with one token each, but share the reading of the weights: the cost of a token more
        # lies between that of one row and that of all. To try and be wrong costs part of a step, not to try all gains.
        self._slope = min(1.0, SLOPE * rows**0.5)
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

    @property
    def current(self) -> bool:
        """Whether a plain step was measured lately."""
        return 1 in self._seen and self._steps - self._seen[1] <= REFRESH

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
        """Probability of each token of a draft to hold if those before it do."""
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


def best_depth(
    rows: Sequence[Sequence[float]],
    costs: StepCosts,
    most: int,
    drafting: Sequence[float],
    credit: Sequence[float] | None = None,
) -> int:
    """The depth that gives the most tokens a second, 0 where none gives more than plain decoding.

    rows: each row's rates of acceptance; drafting: seconds that drafting to depth 0, 1, ... takes from now on; credit:
    plain steps that each row may lose to the width that others have.
    """
    best, depth = len(rows) / costs(1) * GAIN, 0
    tokens = float(len(rows))
    reached, gained = [1.0] * len(rows), [0.0] * len(rows)
    for candidate in range(1, most + 1):
        for row, rates in enumerate(rows):
            reached[row] *= rates[candidate - 1] if candidate <= len(rates) else 0.0
        if sum(reached) < UNLIKELY:
            break
        tokens += sum(reached)
        for row, more in enumerate(reached):
            gained[row] += more
        cost = costs(1 + candidate)
        speed = tokens / (cost + drafting[candidate])
        lost = cost / costs(1) - 1
        if speed > best and (credit is None or all(own + got >= lost for own, got in zip(credit, gained))):
            best, depth = speed, candidate
    return depth
