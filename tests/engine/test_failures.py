"""What one request brings along and fails in: a grammar, a callback. Nobody else's answer changes, and nobody hangs."""

from __future__ import annotations

from collections.abc import Sequence
from time import sleep

import pytest
from torch import Tensor

import lmstate
from lmstate.engine import EngineClosed, Request
from lmstate.engine.admission import Admission
from tests.engine.alone import alone
from tests.engine.test_batching import paused, prompt
from tests.zoo import ours


class Failing:
    """A grammar without a rule that raises `error` in the method of this name."""

    complete = ended = False

    def __init__(self, where: str, error: type[BaseException]) -> None:
        self._where, self._error = where, error

    def _reached(self, where: str) -> None:
        if where == self._where:
            raise self._error(f"in {where}")

    def allowed(self) -> Tensor | None:
        self._reached("allowed")
        return None

    def accept(self, token: int) -> None:
        self._reached("accept")

    def rollback(self, count: int) -> None:
        self._reached("rollback")

    def forced(self) -> Sequence[int]:
        self._reached("forced")
        return ()

    def copy(self) -> Failing:
        self._reached("copy")
        return self


class Panic(BaseException):
    """As native code raises it: no Exception."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Panic])
@pytest.mark.parametrize("where", ["copy", "allowed", "accept", "forced"])
def test_a_grammar_that_raises_ends_its_own_request_alone(where: str, error: type[BaseException]) -> None:
    model = ours("llama")
    with lmstate.Engine(model, rows=3) as engine:
        go = paused(engine)
        other = engine.submit(prompt(20, 1), max_new_tokens=12, ignore_eos=True)
        own = engine.submit(prompt(20, 2), max_new_tokens=12, ignore_eos=True, grammar=Failing(where, error))
        go.set()
        with pytest.raises(ValueError if error is ValueError else RuntimeError, match=f"in {where}"):
            own.result(60)
        assert other.result(60).tokens[0] == alone(model, prompt(20, 1), 12, ends=frozenset())[0]
        assert engine.submit(prompt(5, 3), max_new_tokens=2, ignore_eos=True).result(60).finished == ["length"]


def test_a_waiting_request_that_cannot_be_ended_takes_nobody_with_it() -> None:
    model = ours("llama")
    with lmstate.Engine(model, rows=1) as engine:
        other = engine.submit(prompt(20, 1), max_new_tokens=40, ignore_eos=True)
        next(iter(other))
        own = engine.submit(prompt(20, 2), grammar=Failing("copy", RuntimeError))
        own.cancel()
        with pytest.raises(RuntimeError, match="in copy"):
            own.result(60)
        assert other.result(60).finished == ["length"]


def test_closing_ends_all_whatever_one_of_them_raises() -> None:
    model = ours("llama")
    engine = lmstate.Engine(model, rows=1)
    running = engine.submit(prompt(20, 1), max_new_tokens=10**6, ignore_eos=True)
    next(iter(running))
    waiting = engine.submit(prompt(20, 2), grammar=Failing("copy", Panic))
    go = paused(engine)
    late = engine.call(lambda _: 1)
    engine._closed = True  # as `close` says it first, from another thread
    go.set()
    engine.close()
    assert running.result(60).finished == ["cancelled"]
    with pytest.raises(RuntimeError, match="Panic: in copy"):
        waiting.result(60)
    assert late.done()
    with pytest.raises(EngineClosed):
        engine.explain([1, 2])


def test_a_callback_that_raises_is_nobody_s_error(caplog: pytest.LogCaptureFixture) -> None:
    model = ours("llama")

    def fail(request: Request) -> None:
        raise ZeroDivisionError("of the callback")

    with lmstate.Engine(model, rows=2) as engine:
        first = engine.submit(prompt(20, 1), max_new_tokens=10**6, ignore_eos=True)
        second = engine.submit(prompt(20, 2), max_new_tokens=30, ignore_eos=True)
        first.when_done(fail)
        first.cancel()
        assert first.result(60).finished == ["cancelled"]
        assert second.result(60).finished == ["length"]
        assert engine.stats()["failed"] == 0
    assert "of the callback" in caplog.text


def test_a_prompt_of_low_priority_that_was_begun_is_read_though_others_keep_coming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmstate.engine.job.AGING", 0.05)
    model = ours("llama")
    with lmstate.Engine(model, rows=3, queue=100) as engine:
        low = engine.submit(prompt(600, 999), max_new_tokens=1)
        live: list[Request] = []
        for number in range(1000):
            live = [request for request in live if not request.done]
            while len(live) < 6:
                live.append(engine.submit(prompt(600, 10 * number + len(live)), max_new_tokens=1, priority=1))
            if low.done:
                break
            sleep(0.002)
        for request in live:
            request.cancel()
        assert low.done


def test_a_failing_scheduler_ends_those_that_wait_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ours("llama")

    def admit(_: Admission) -> None:
        raise OverflowError("no such order")

    with lmstate.Engine(model) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Admission, "admit", admit)
            with pytest.raises(OverflowError, match="no such order"):
                engine.submit([1, 2], max_new_tokens=2).result(60)
        assert len(engine.submit([1, 2], max_new_tokens=2, ignore_eos=True).result(60).tokens[0]) == 2
