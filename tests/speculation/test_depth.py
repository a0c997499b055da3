"""The depth of drafts follows measured costs and acceptance, and zero is a depth."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from lmstate.speculation import Draft, Speculator
from lmstate.speculation.depth import DEEPER, Acceptance, StepCosts, best_depths

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


def tokens_of(drafts: dict[int, Draft]) -> int:
    return len(drafts) + sum(map(len, drafts.values()))


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
        speculator.verified(drafts, accepted)
        speculator.measured(tokens_of(drafts), cost(tokens_of(drafts)), rows, sum(accepted.values()))
        # The model's own token is another one than a drafted one that failed, and may be what would have been drafted.
        last = {row: int(accepted[row] < len(draft) or rng.random() > right) for row, draft in drafts.items()}
        speculator.observe({row: [0] * held + [last[row]] for row, held in accepted.items()})
        tokens += rows + sum(accepted.values())
        seconds += cost(tokens_of(drafts))
    return rows / cost(rows), tokens / seconds


def cheap(tokens: int) -> float:
    return 1.0 + 0.05 * (tokens - 1)


def dear(tokens: int) -> float:
    return float(tokens)


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


# Of eight rows of a small int4 model on two cores, over a step of one token each.
UNLOADED = ((8, 1.0), (16, 1.27), (24, 1.66), (32, 2.06), (64, 3.7))
LOADED = ((8, 1.0), (16, 1.6), (24, 2.3), (32, 3.0), (64, 5.8))  # others use the second one


def line(knots: Sequence[tuple[int, float]], tokens: int) -> float:
    above = next(at for at in range(1, len(knots)) if tokens <= knots[at][0])
    (left, low), (right, high) = knots[above - 1 : above + 1]
    return low + (high - low) * (tokens - left) / (right - left)


@pytest.mark.parametrize(("knots", "rights", "least"), [
    (UNLOADED, (0.97,) * 8, 1.35), (LOADED, (0.97,) * 8, 1.12), *(
        (knots, rights, 0.97) for knots in (UNLOADED, LOADED) for rights in (
            (0.97,) * 6 + (0.0,) * 2, (0.9,) * 4 + (0.0,) * 4, (0.97,) + (0.0,) * 7, (0.5,) * 8, (0.3,) * 8, (0.0,) * 8,
            (0.9, 0.9, 0.6, 0.6, 0.3, 0.3, 0.1, 0.1),
        )
    ),
])  # fmt: skip
def test_rows_of_different_text_share_what_drafts_cost(
    knots: Sequence[tuple[int, float]], rights: tuple[float, ...], least: float
) -> None:
    """A row without a draft pays for those that the others have; text that repeats is drafted with confidence."""
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
        speculator.verified(drafts, accepted)
        cost = line(knots, tokens_of(drafts)) * rng.choice([1.0, 1.0, 1.1, 1.5])  # others use the machine too
        speculator.measured(tokens_of(drafts), cost, 8, sum(accepted.values()))
        last = {row: int(accepted[row] < len(draft) or rng.random() > rights[row]) for row, draft in drafts.items()}
        speculator.observe({row: [0] * held + [last[row]] for row, held in accepted.items()})
        tokens += 8 + sum(accepted.values())
        seconds += cost
        spent += line(knots, tokens_of(drafts))
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


def test_rows_that_share_a_step_stay_within_its_logits() -> None:
    assert Speculator(Repeats(), VOCAB, rows=1).most == 63
    assert Speculator(Repeats(), VOCAB, rows=8).most == 7
    assert Speculator(Repeats(), VOCAB, rows=40).most == 0


def test_costs_between_and_beyond_measured_ones_lie_on_lines() -> None:
    costs = StepCosts()
    costs.measured(1, 1.0)
    assert costs(5, plain=1) > 1.0
    costs.measured(5, 3.0)
    assert costs(3, plain=1) == pytest.approx(2.0) and costs(9, plain=1) == pytest.approx(5.0)


def test_a_step_costs_no_more_than_one_of_more_tokens() -> None:
    costs = StepCosts()
    for tokens, seconds in ((1, 1.5), (5, 9.0), (8, 1.2), (16, 2.0)):
        costs.measured(tokens, seconds)
    assert [costs(tokens, plain=1) for tokens in (1, 3, 5, 8, 16)] == [1.2, 1.2, 1.2, 1.2, 2.0]


def test_a_cost_that_was_measured_once_is_forgotten_sooner_than_one_measured_often() -> None:
    costs = StepCosts()
    for tokens in (4, 6, 6, 6, 6):
        costs.measured(tokens, 50.0)
    for _ in range(100):
        costs.measured(1, 1.0)
    assert 4 not in costs and 6 in costs and 1 in costs


def test_an_unlucky_measurement_is_not_believed_for_ever() -> None:
    costs = StepCosts()
    costs.measured(1, 1.0)
    costs.measured(4, 50.0)
    for _ in range(300):
        costs.measured(1, 1.0)
    assert costs(4, plain=1) < 2.0


def test_acceptance_is_learned_by_confidence() -> None:
    acceptance = Acceptance()
    sure, unsure = Draft((1,), (0.95,)), Draft((1,), (0.3,))
    for _ in range(50):
        acceptance.compare(sure, [1])
        acceptance.compare(unsure, [2])
    assert acceptance.rates(sure)[0] > 0.9 and acceptance.rates(unsure)[0] < 0.1
    assert acceptance.compare(Draft((1, 2, 3)), [1, 2, 9]) == 2
    assert acceptance.compare(Draft((1, 2, 3)), [1]) == 1


def test_a_row_is_told_from_others_that_the_drafter_is_as_sure_of() -> None:
    of_all = Acceptance()
    rows = [Acceptance(of_all) for _ in range(2)]
    draft = Draft((1,), (0.9,))
    for _ in range(50):
        for row, actual in zip(rows, ([1], [2])):
            of_all.compare(draft, actual)
            row.compare(draft, actual)
    assert rows[0].rates(draft)[0] > 0.8 and rows[1].rates(draft)[0] < 0.2
    assert Acceptance(of_all).rates(draft) == of_all.rates(draft)


def test_no_depth_pays_where_nothing_holds() -> None:
    def cost(tokens: int) -> float:
        return 1.0 + 0.06 * (tokens - 1)

    assert best_depths([[0.0] * 8], cost) == [0]
    assert best_depths([[1.0] * 8], cost) == [8]
    assert best_depths([[1.0] * 8], cost, drafting=lambda depth: 2.0 * depth) == [0]


def test_each_row_has_the_depth_that_its_own_rates_are_worth() -> None:
    """No other depths give more than a few hundredths more tokens a second."""
    rows = [[0.9] * 4, [0.5] * 4, [], [0.97, 0.97, 0.1, 0.9]]

    def cost(tokens: int) -> float:
        return 1.0 + 0.1 * tokens

    def speed(depths: Sequence[int]) -> float:
        reached = [math.prod(rates[:at]) for rates, depth in zip(rows, depths) for at in range(1, depth + 1)]
        return (4 + sum(reached)) / cost(4 + len(reached))

    depths = best_depths(rows, cost)
    assert depths == [4, 0, 0, 2]
    assert speed(depths) > max(map(speed, itertools.product(range(5), range(5), [0], range(5)))) / DEEPER


def test_a_row_without_credit_pays_for_no_neighbor() -> None:
    rows = [[0.97] * 8, []]
    cost = {tokens: 1.0 + 0.1 * (tokens - 2) for tokens in range(2, 11)}.__getitem__
    assert best_depths(rows, cost)[0] > 3
    assert best_depths(rows, cost, credit=[0.0, 0.25])[0] == 2
    assert best_depths(rows, cost, credit=[9.0, -0.1]) == [0, 0]


@pytest.mark.parametrize(("seconds", "most"), [(0.3, 20), (0.0015, 80)])  # of a plain step, each token
def test_a_drafter_that_is_always_wrong_is_left_alone_the_sooner_the_slower_it_is(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    drafter = Repeats()
    propose = drafter.propose

    def slow(rows: Sequence[int], depth: int) -> list[list[int]]:
        clock[0] += seconds * depth
        return propose(rows, depth)

    monkeypatch.setattr(drafter, "propose", slow)
    speculator = Speculator(drafter, VOCAB, 1)
    speculator.observe({0: [5]})
    for _ in range(500):
        draft = speculator.propose({0: 31})[0]
        speculator.verified({0: draft}, {0: 0})
        speculator.measured(1 + len(draft), cheap(1 + len(draft)), 1, 0)
        speculator.observe({0: [9]})
    assert drafter.asked < most and clock[0] < 0.05 * 500
