"""Choice of draft depths: measured costs of a step by its tokens, measured acceptance, and the depths that pay most."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace

from lmstate.speculation.drafter import Draft

DOWN, UP = 0.5, 0.1  # weight of a measurement below and above what was known: others on the machine can only add
OFTEN = 4  # measurements of a step after which its cost is believed
FORGET = 16  # steps after which a cost that was measured once is looked for again; n times: n * n as many
REFRESH = 32  # steps after which plain decoding is measured again: both costs are to be of the same load of the machine
FIRST = 4  # drafted tokens that are tried at first, or one for each row
SLOPE = 0.1  # of a plain step of one row, for each more token: assumed until some were measured
CREDIT, CREDIT_STEP = 0.5, 0.01  # plain steps that a row may lose to its neighbors: at first, and more at each step
UNLIKELY = 0.02  # a token that is reached with no more probability ends the search
GAIN = 1.03  # drafting must promise this much over plain decoding
DEEPER = 1.02  # and a token more this much over doing without: deep drafts lose most where estimates err
LEVELS = 12
TRUST, TRUST_ALL = 4.0, 16.0  # trials that a drafter's own confidence counts for, and that of all rows for one of them
MEMORY = 64.0  # trials over which acceptance is averaged


class StepCosts:
    """Seconds of a step by its tokens, those of all rows. A plain one has a token for each row that goes on."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._times: dict[int, int] = {}  # that each was measured, `OFTEN` at most
        self._seen: dict[int, int] = {}
        self._steps = 0
        self._known: list[tuple[int, float]] = []  # tokens and seconds, both rising

    def measured(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        old = self._seconds.get(tokens, seconds)
        self._seconds[tokens] = old + (DOWN if seconds < old else UP) * (seconds - old)
        self._times[tokens] = min(OFTEN, self._times.get(tokens, 0) + 1)
        self._seen[tokens] = self._steps
        for stale in [known for known in self._seconds if self._age(known) > FORGET * self._times[known] ** 2]:
            del self._seconds[stale], self._seen[stale]
        # A step never takes longer than one of more tokens: where it seems to, it was unlucky.
        self._known, least = [], math.inf
        for known in sorted(self._seconds, reverse=True):
            least = min(least, self._seconds[known])
            self._known.insert(0, (known, least))

    def __contains__(self, tokens: int) -> bool:
        return tokens in self._seconds

    def current(self, tokens: int) -> bool:
        """Whether a step of `tokens` tokens was measured lately, or a while ago and often."""
        return tokens in self and self._age(tokens) <= REFRESH * self._times[tokens] // OFTEN

    def __call__(self, tokens: int, plain: int) -> float:
        """Seconds of a step, between and beyond measured ones along a line. Needs the cost of a plain one.

        Infinite where it has more than twice as many drafted tokens as any that was measured: not too far at once.
        """
        at = bisect_left(self._known, (tokens, 0.0))
        above, high = self._known[at] if at < len(self._known) else (0, 0.0)
        if above == tokens:
            return high
        below, low = self._known[at - 1]
        if above:
            return low + (high - low) * (tokens - below) / (above - below)
        if tokens - plain > max(FIRST, plain, 2 * (below - plain)):
            return math.inf
        first = self(plain, plain)
        # Many rows fill a processor with one token each, but share the reading of the weights: the cost of a token more
        # is between that of one row and that of all. To try and be wrong costs part of a step, not to try all gains.
        slope = SLOPE * first / plain**0.5
        if below > plain:  # the first few tokens may come for nothing, and those after them not
            slope = max(slope / 4, (low - first) / (below - plain))
        return low + slope * (tokens - below)

    def _age(self, tokens: int) -> int:
        return self._steps - self._seen[tokens]


class Acceptance:
    """Conditional acceptance rate of a drafted token, by the drafter's confidence in it."""

    def __init__(self, of_all: Acceptance | None = None) -> None:
        """`of_all`: that of all rows, which one row's begins with."""
        self._of_all = of_all
        self._trials: dict[tuple[str, int], float] = {}
        self._held: dict[tuple[str, int], float] = {}

    def rates(self, draft: Draft) -> list[float]:
        """Probability of each token of a draft to hold if those before it do."""
        rates: list[float] = []
        said, trust = (draft.confidence, TRUST) if self._of_all is None else (self._of_all.rates(draft), TRUST_ALL)
        for at in range(len(draft)):
            level = _level(draft, at)
            # Before anything was counted: what the drafter says, or else what held for the place before.
            prior = said[at] if said is not None else rates[-1] if rates else 0.5
            trials, held = self._trials.get(level, 0.0), self._held.get(level, 0.0)
            rates.append((held + trust * prior) / (trials + trust))
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


def best_depths(
    rows: Sequence[Sequence[float]],
    cost: Callable[[int], float],
    drafting: Callable[[int], float] | None = None,
    credit: Sequence[float] | None = None,
) -> list[int]:
    """The depth for each row that gives most tokens a second to all; zeros where none gives more than plain decoding.

    rows: the rates of acceptance of each row's draft. cost: seconds of a step by its tokens. drafting: seconds that
    drafting to a depth takes from now on. credit: plain steps that each row may lose to the drafts of others.
    """
    plain = cost(len(rows))
    best, chosen = len(rows) / plain * GAIN, 0
    expected, deepest = float(len(rows)), 0
    order: list[int] = []  # rows, each as often as it has tokens
    gained = [0.0] * len(rows)
    # The tokens that are most probably reached come first: of as many, no others give more. Of equals, those of the
    # row that lost most.
    lost = credit or gained[:]
    heap = [(-rates[0], 1, lost[row], row) for row, rates in enumerate(rows) if rates]
    heapify(heap)
    while heap and heap[0][0] < -UNLIKELY:
        reached, depth, _, row = heap[0]
        if depth < len(rows[row]):
            heapreplace(heap, (reached * rows[row][depth], depth + 1, lost[row], row))
        else:
            heappop(heap)
        order.append(row)
        expected -= reached
        gained[row] -= reached
        deepest = max(deepest, depth)
        seconds = cost(len(rows) + len(order))
        speed = expected / (seconds + (drafting(deepest) if drafting else 0.0))
        if speed > best and (credit is None or _all_afford(seconds / plain - 1, gained, credit)):
            best, chosen = speed * DEEPER, len(order)
    depths = Counter(order[:chosen])
    return [depths[row] for row in range(len(rows))]


def _all_afford(steps: float, gained: Sequence[float], credit: Sequence[float]) -> bool:
    """Whether each row can afford a step that takes `steps` more plain steps and gains it `gained` tokens."""
    return all(got > steps or own + got >= steps for got, own in zip(gained, credit))
