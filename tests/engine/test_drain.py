"""An engine that is drained hands out what it has answered, and others go on from there; and what load it tells of."""

from __future__ import annotations

import hashlib
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

import lmstate
from lmstate.engine import Drained, EngineClosed
from tests.engine.test_batching import paused, prompt
from tests.waiting import wait_until
from tests.zoo import ours

LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 1.1, "n": 2}


@pytest.mark.parametrize("case", ["llama", "qwen3_next-dense"])
def test_what_was_answered_goes_on_elsewhere(case: str, tmp_path: Path) -> None:
    model, ids = ours(case), prompt(150, 1)
    asked = [(ids, LONG), ([*ids, 5], {**LONG, "n": 3}), (prompt(40, 2), {**LONG, "n": 1, "temperature": 0.0})]
    with lmstate.Engine(model, rows=3, store=tmp_path) as engine:
        requests = [engine.submit(text, **given) for text, given in asked]
        pieces = iter(requests[0])
        for _ in range(10):
            next(pieces)
        assert engine.drain() is True
        with pytest.raises(EngineClosed, match="drained"):
            engine.submit(ids)
        drained = []
        for request in requests:
            with pytest.raises(Drained, match="go on elsewhere") as raised:
                request.result(600)
            drained.append(raised.value)
            assert sum(map(len, raised.value.answered)) == request.generated
        assert requests[0].generated >= 10
        assert engine.load().waiting == engine.load().answering == 0
    with lmstate.Engine(model, store=tmp_path) as other:
        known = other.explain([*ids, *drained[0].answered[0], 0]).matched
        assert known >= 150 + len(drained[0].answered[0]) - 1, "its state was stored"
        for (text, given), told in zip(asked, drained):
            less = {**given, "seed": told.seed, "max_new_tokens": max(map(len, told.answered)) + 8}
            rest = other.submit(text, answered=told.answered, **less).result(600)
            whole = other.submit(text, **less).result(600)
            assert rest.tokens == whole.tokens and len(told.answered) == given["n"]


def test_draining_lets_those_end_that_can() -> None:
    with lmstate.Engine(ours("llama")) as engine:
        go = paused(engine)
        requests = [engine.submit([1, number], max_new_tokens=3) for number in range(3)]
        draining = Thread(target=engine.drain, args=(600,))
        draining.start()
        wait_until(lambda: engine._draining)
        go.set()
        assert all(len(request.result(600).tokens[0]) <= 3 for request in requests)
        draining.join(600)
        assert not draining.is_alive()


def test_the_turn_of_a_session_that_is_drained_is_not_half_there(tmp_path: Path) -> None:
    model = ours("llama")
    given: dict[str, Any] = {"max_new_tokens": 300, "ignore_eos": True}
    with lmstate.Engine(model, store=tmp_path) as engine:
        session = engine.session("one")
        session.send([1, 2, 3], max_new_tokens=4).result(600)
        kept = session.tokens
        turn = session.send([5], **given)
        next(iter(turn))
        engine.drain()
        with pytest.raises(Drained) as drained:
            turn.result(600)
        assert session.tokens == kept
    with lmstate.Engine(model, store=tmp_path) as other:
        session = other.session("one")
        assert session.tokens == kept
        (answered,) = drained.value.answered
        given["max_new_tokens"] = len(answered) + 8
        rest = session.send([5], answered=[answered], **given).result(600)
        assert session.tokens == [*kept, 5, *rest.tokens[0]]
        assert rest.tokens[0][: len(answered)] == answered and len(rest.tokens[0]) == len(answered) + 8


# ---- load and residency


def test_the_load_is_what_waits_and_is_read() -> None:
    with lmstate.Engine(ours("llama"), rows=2, memory=10**7) as engine:
        idle = engine.load()
        assert (idle.waiting, idle.reading, idle.answering, idle.unread, idle.first_token) == (0, 0, 0, 0, 0.0)
        engine.submit(prompt(300, 9), max_new_tokens=2).result(600)
        go = paused(engine)
        requests = [engine.submit(prompt(100, seed), max_new_tokens=2) for seed in range(3)]
        busy = engine.load()
        assert (busy.waiting, busy.unread) == (3, 300)
        assert busy.first_token is not None and busy.first_token > 0
        go.set()
        for request in requests:
            request.result(600)
        wait_until(lambda: engine.load().answering == 0)
        after = engine.load()
        assert (after.waiting, after.reading, after.unread) == (0, 0, 0)
        cost = engine._cost
        assert 0 < after.free_tokens <= 10**7 / cost.per_token


def test_resident_prefixes_are_named_by_what_they_begin_with() -> None:
    def name(ids: list[int]) -> str:
        return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()

    first, second = prompt(200, 1), prompt(90, 2)
    with lmstate.Engine(ours("llama")) as engine:
        assert engine.resident() == []
        engine.submit(first, max_new_tokens=1).result(600)
        engine.submit(second, max_new_tokens=1).result(600)
        found = engine.resident()
        assert found == [name(second[:64]), name(first[:192]), name(first[:128]), name(first[:64])]
        assert engine.resident(2) == found[:2] and engine.resident(0) == []
        engine.submit([*first, 5], max_new_tokens=1).result(600)
        assert engine.resident(1) == [name(first[:192])]
        engine.clear_prefixes()
        assert engine.resident() == []
