"""The depth of drafts follows measured costs and acceptance, and zero is a depth."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from lmstate.speculation import Draft, Speculator
from lmstate.speculation.depth import Acceptance, StepCosts, best_depth

VOCAB = 50


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a test moves on: those of the machine are no part of costs that a test has made up."""
    clock = [0.0]
    monkeypatch.setattr("lmstate.speculation.speculator.perf_counter", lambda: clock[0])
    return clock


class Repeats:
    """Drafts zeros."""

    def __init__(self) -> None:
        self.asked = 0

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        pass

    def propose(self, rows: Sequence[int], depth: int) -> list[list[int]]:
        self.asked += 1
        return [[0] * depth for _ in rows]


def simulate(right: float, cost: Callable[[int], float], steps: int = 400, rows: int = 1) -> tuple[float, float]:
    """Tokens a second of plain decoding and of speculation, where a drafted token holds with probability `right`."""
    rng = random.Random(3)
    speculator = Speculator(Repeats(), VOCAB, rows)
    speculator.observe({row: [5] for row in range(rows)})
    tokens, seconds = 0, 0.0
    for _ in range(steps):
        drafts = speculator.propose(dict.fromkeys(range(rows), 31))
        accepted = {}
        for row, draft in drafts.items():
            held = next((at for at in range(len(draft)) if rng.random() > right), len(draft))
            accepted[row] = held
        width = 1 + max(map(len, drafts.values()))
        speculator.verified(drafts, accepted)
        speculator.measured(width, cost(width), rows, sum(accepted.values()))
        last = {row: 0 if len(draft) == 0 and rng.random() < right else 1 for row, draft in drafts.items()}
        speculator.observe({row: [0] * held + [last[row]] for row, held in accepted.items()})
        tokens += rows + sum(accepted.values())
        seconds += cost(width)
    return rows / cost(1), tokens / seconds


def cheap(width: int) -> float:
    return 1.0 + 0.05 * (width - 1)


def dear(width: int) -> float:
    return float(width)


@pytest.mark.parametrize("right", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("cost", [cheap, dear])
@pytest.mark.parametrize("rows", [1, 8])
def test_speculation_is_never_much_slower(right: float, cost: Callable[[int], float], rows: int) -> None:
    plain, drafted = simulate(right, cost, rows=rows)
    assert drafted > 0.97 * plain


def test_speculation_pays_where_it_can() -> None:
    plain, drafted = simulate(0.8, cheap)
    best = max((1 - 0.8 ** (depth + 1)) / (1 - 0.8) / cheap(1 + depth) for depth in range(32))
    assert drafted > 0.85 * best * plain


def measured8(width: int) -> float:
    """Eight rows of a small int4 model on two cores, over a step of one token each."""
    return {1: 1.0, 2: 1.27, 3: 1.66, 4: 2.06}[width]


@pytest.mark.parametrize(("rights", "least"), [
    ((0.97,) * 8, 1.35), ((0.97,) * 6 + (0.0,) * 2, 0.97), ((0.9,) * 4 + (0.0,) * 4, 0.97),
    ((0.97,) + (0.0,) * 7, 0.97), ((0.5,) * 8, 0.97), ((0.3,) * 8, 0.97), ((0.0,) * 8, 0.97),
])  # fmt: skip
def test_rows_of_different_text_share_the_depth_that_pays_for_all(rights: tuple[float, ...], least: float) -> None:
    """A row without a draft pays for the width that the others have; text that repeats is drafted with confidence."""
    rng = random.Random(4)
    speculator = Speculator(Surely(rights), VOCAB, 8)
    speculator.observe({row: [5] for row in range(8)})
    tokens, seconds, spent, texts = 0, 0.0, 0.0, [0] * 8
    for _ in range(600):
        drafts = speculator.propose(dict.fromkeys(range(8), 31))
        accepted = {
            row: next((at for at in range(len(draft)) if rng.random() > rights[row]), len(draft))
            for row, draft in drafts.items()
        }
        width = 1 + max(map(len, drafts.values()))
        speculator.verified(drafts, accepted)
        cost = measured8(width) * rng.choice([1.0, 1.0, 1.1, 1.5])  # others use the machine too
        speculator.measured(width, cost, 8, sum(accepted.values()))
        last = {row: 0 if not draft.tokens and rng.random() < rights[row] else 1 for row, draft in drafts.items()}
        speculator.observe({row: [0] * held + [last[row]] for row, held in accepted.items()})
        tokens += 8 + sum(accepted.values())
        seconds += cost
        spent += measured8(width)
        for row, held in accepted.items():
            texts[row] += 1 + held
    assert tokens / seconds * 1.15 / 8 > least  # 1.15: the mean of what others add to a step
    assert min(texts) > 0.95 * spent, "no row is slower for what its neighbors draft"


class Surely:
    """Drafts zeros for the rows that have any hope, with one confidence for all."""

    def __init__(self, rights: Sequence[float]) -> None:
        self.rights = rights

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        pass

    def propose(self, rows: Sequence[int], depth: int) -> list[Draft]:
        return [Draft((0,) * depth, (0.9,) * depth) if self.rights[row] else Draft() for row in rows]


def test_rows_that_share_a_step_stay_within_its_exact_width() -> None:
    assert Speculator(Repeats(), VOCAB, rows=1).most == 31
    assert Speculator(Repeats(), VOCAB, rows=8).most == 3
    assert Speculator(Repeats(), VOCAB, rows=40).most == 0


def test_costs_between_and_beyond_measured_ones_lie_on_lines() -> None:
    costs = StepCosts()
    costs.measured(1, 1.0)
    assert costs(5) > 1.0
    costs.measured(5, 3.0)
    assert costs(3) == pytest.approx(2.0) and costs(9) == pytest.approx(5.0)


def test_an_unlucky_measurement_is_not_believed_for_ever() -> None:
    costs = StepCosts()
    costs.measured(1, 1.0)
    costs.measured(4, 50.0)
    for _ in range(300):
        costs.measured(1, 1.0)
    assert costs(4) < 2.0


def test_acceptance_is_learned_by_confidence() -> None:
    acceptance = Acceptance()
    sure, unsure = Draft((1,), (0.95,)), Draft((1,), (0.3,))
    for _ in range(50):
        acceptance.compare(sure, [1])
        acceptance.compare(unsure, [2])
    assert acceptance.rates(sure)[0] > 0.9 and acceptance.rates(unsure)[0] < 0.1
    assert acceptance.compare(Draft((1, 2, 3)), [1, 2, 9]) == 2
    assert acceptance.compare(Draft((1, 2, 3)), [1]) == 1


def test_no_depth_pays_where_nothing_holds() -> None:
    costs = StepCosts()
    costs.measured(1, 1.0)
    costs.measured(4, 1.2)
    assert best_depth([[0.0] * 8], costs, 8, [0.0] * 9) == 0
    assert best_depth([[1.0] * 8], costs, 8, [0.0] * 9) == 8
    assert best_depth([[1.0] * 8], costs, 8, [2.0 * depth for depth in range(9)]) == 0


def test_a_slow_drafter_that_is_always_wrong_is_soon_left_alone(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Repeats()
    propose = drafter.propose

    def slow(rows: Sequence[int], depth: int) -> list[list[int]]:
        clock[0] += 0.3 * depth
        return propose(rows, depth)

    monkeypatch.setattr(drafter, "propose", slow)
    speculator = Speculator(drafter, VOCAB, 1)
    speculator.observe({0: [5]})
    for _ in range(500):
        draft = speculator.propose({0: 31})[0]
        speculator.verified({0: draft}, {0: 0})
        speculator.measured(1 + len(draft), cheap(1 + len(draft)), 1, 0)
        speculator.observe({0: [9]})
    assert drafter.asked < 20 and clock[0] < 0.05 * 500
