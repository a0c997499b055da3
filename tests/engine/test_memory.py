"""The budget of bytes: rows and what is kept hold it after every step, and what had to give way goes on to the bit."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import transformers

import lmstate
from lmstate.engine import Request
from lmstate.engine.memory import MemoryBudget
from lmstate.engine.scheduler import Scheduler
from tests.engine.alone import alone
from tests.engine.test_batching import KINDS, paused, prompt
from tests.engine.test_prefixes import check
from tests.zoo import ours


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes owned and kept after each step, which are checked."""
    whole = Scheduler.step
    seen: list[int] = []

    def step(self: Scheduler) -> bool:
        done = whole(self)
        reuse = self._work.reuse
        prefixes = reuse.prefixes
        seen.append(self._work.row_bytes() + prefixes.nbytes)
        if seen[-1] > reuse.memory or prefixes.nbytes != prefixes.counted():
            broken.append(seen[-1])
        return done

    broken: list[int] = []
    monkeypatch.setattr(Scheduler, "step", step)
    yield seen
    assert seen
    assert not broken


# Too little for all rows at a time, and enough for the longest.
BUDGETS = {
    "attention": (110_000, 150_000),
    "window": (200_000, 280_000),
    "latent": (100_000, 130_000),
    "compressed": (450_000, 700_000),
    "hybrid": (250_000, 330_000),
    "state space": (170_000, 330_000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_store_stay_within_the_budget_under_any_load(kind: str, steps: list[int]) -> None:
    model = ours(KINDS[kind])
    dice = random.Random(kind)
    preempted = 0.0
    for memory in BUDGETS[kind]:
        with lmstate.Engine(model, rows=6, memory=memory) as engine:
            go = paused(engine)
            asked = []
            for number in range(7):
                ids = [*prompt(30, number % 2), *prompt(dice.randint(1, 60), 50 + number)]
                options = {"priority": dice.choice([0, 0, 1]), "n": dice.choice([1, 1, 3])}
                asked.append((ids, engine.submit(ids, max_new_tokens=12, logprobs=0, ignore_eos=True, **options)))
            go.set()
            for ids, request in asked:
                got = request.result(600)
                assert got.finished == ["length"] * len(got.tokens)
                check(model, ids, got)
                assert all(tokens == got.tokens[0] for tokens in got.tokens)
            engine.call(lambda _: None).result(600)  # the step that ended the last of them is over
            stats = engine.stats()
            preempted += stats["preempted"]
            assert (stats["row_bytes"], stats["set_aside"], stats["waiting"]) == (0, 0, 0)
    assert preempted > 0, "there was room for all: the test shows nothing"


def test_the_latest_request_of_the_lowest_priority_gives_way() -> None:
    model = ours("llama")
    with lmstate.Engine(model, rows=4, memory=190_000, draft=None) as engine:
        go = paused(engine)
        asked = {
            priority: engine.submit(prompt(40, 10 + priority), max_new_tokens=140, ignore_eos=True, priority=priority)
            for priority in (0, 2, 1)
        }
        ended: list[int] = []
        for priority, request in asked.items():
            request.when_done(lambda _, priority=priority: ended.append(priority))
        go.set()
        for priority, request in asked.items():
            (got,) = request.result(600).tokens
            assert got == alone(model, prompt(40, 10 + priority), 140, ends=frozenset(), guess=got)[0]
        engine.call(lambda _: None).result(600)  # who waits for a result may hear of it before the callback
        assert ended == [2, 1, 0]
        assert engine.stats()["preempted"] > 0


def test_a_prompt_that_can_never_fit_is_refused_and_an_answer_that_outgrows_memory_ends_with_what_it_has() -> None:
    model = ours("llama")
    with lmstate.Engine(model, rows=4, memory=80_000) as engine:
        with pytest.raises(lmstate.CapacityError, match="memory=80,000"):
            engine.submit(prompt(140, 1) * 2)
        got = engine.submit(prompt(20, 1), max_new_tokens=10**6, ignore_eos=True).result(600)
        assert got.finished == ["capacity"]
        assert len(got.tokens[0]) > 50
        (tokens,) = got.tokens
        assert tokens == alone(model, prompt(20, 1), len(tokens), ends=frozenset(), guess=tokens)[0]
        assert len(engine.submit(prompt(20, 2), max_new_tokens=3).result(600).tokens[0]) == 3


def test_an_engine_that_could_take_no_request_is_not_made() -> None:
    model = ours("llama")
    with pytest.raises(lmstate.CapacityError, match="1,024 bytes of memory were asked for") as refused:
        lmstate.Engine(model, memory="1KiB")
    needed = int(str(refused.value).partition("needs about ")[2].split()[0].replace(",", ""))
    with pytest.raises(lmstate.CapacityError, match=f"{needed:,}"):
        lmstate.Engine(model, memory=needed - 1)
    with lmstate.Engine(model, memory=needed) as engine:
        assert len(engine.submit(prompt(20, 1), max_new_tokens=3).result(600).tokens[0]) == 3


@pytest.mark.parametrize("positions", [24, 64, 100])
def test_a_model_of_few_positions_is_served(positions: int, tmp_path: Path) -> None:
    """Rows are measured with one block and with two: such a model has no two, or not even one."""
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=positions, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = lmstate.load(tmp_path, weights="float32")
    with lmstate.Engine(model) as engine:
        got = engine.submit(prompt(20, 1), max_new_tokens=4).result(600).tokens[0]
    assert got == alone(model, prompt(20, 1), 4)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [5, 40, 100])
def test_requests_end_well_where_memory_is_what_one_of_them_is_estimated_to_take(
    kind: str, length: int, steps: list[int]
) -> None:
    model = ours(KINDS[kind])
    with lmstate.Engine(model) as engine:
        memory = engine._cost(length + 40)
    with lmstate.Engine(model, rows=3, memory=int(1.25 * memory)) as engine:
        go = paused(engine)
        asked = [engine.submit(prompt(length, n), max_new_tokens=40, ignore_eos=True) for n in range(3)]
        go.set()
        assert [request.result(600).finished for request in asked] == [["length"]] * 3


def test_cancelling_what_gave_way_ends_it_with_what_it_has(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours("llama")
    asked: list[Request] = []
    gave_way: list[Request] = []
    whole = MemoryBudget.bound

    def bound(self: MemoryBudget) -> None:
        """Cancel at the step at which an answer gave way: by the next one it may be back."""
        whole(self)
        if (preempted := self._work.preempted) and not gave_way:
            gave_way.extend(aside.job.request for aside in preempted)
            for request in asked[1:]:
                request.cancel()

    monkeypatch.setattr(MemoryBudget, "bound", bound)
    with lmstate.Engine(model, rows=4, memory=120_000) as engine:
        go = paused(engine)
        asked += [engine.submit(prompt(40, n), max_new_tokens=120, ignore_eos=True, n=2) for n in range(3)]
        go.set()
        for n, request in enumerate(asked):
            got = request.result(600)
            for tokens in got.tokens:
                assert tokens == alone(model, prompt(40, n), len(tokens), ends=frozenset(), guess=tokens)[0]
        assert any("cancelled" in request.result().finished for request in gave_way)
        engine.call(lambda _: None).result(600)  # the step that ended the last of them is over
        assert engine.stats()["row_bytes"] == 0


@pytest.mark.soak
def test_a_hundred_thousand_short_requests_leave_nothing_behind(steps: list[int]) -> None:
    model = ours("llama")
    dice = random.Random(0)
    objects: list[int] = []
    with lmstate.Engine(model, rows=8, memory=400_000) as engine:
        for round in range(10):
            for _ in range(10_000 // 50):
                ids = [[dice.randrange(3, 90) for _ in range(dice.randint(1, 5))] for _ in range(50)]
                for request in [engine.submit(one, max_new_tokens=2) for one in ids]:
                    request.result(600)
            gc.collect()
            objects.append(len(gc.get_objects()))
            assert engine.stats()["row_bytes"] == 0, round
            steps.clear()
            steps.append(0)
    assert objects[-1] < 1.02 * objects[1]
