"""Readers of requests hear of what is new with a delivery: all of one event loop by one wake-up."""

from __future__ import annotations

import asyncio
from threading import Event, Thread
from typing import Any

import pytest

import lmstate
from lmstate.engine.delivery import Delivery
from lmstate.engine.request import Request
from lmstate.engine.results import Completion, Piece, Usage
from tests.zoo import ours

DONE = Completion([""], [[1]], [1], None, None, ["eos"], [1], Usage(1, 0, 1))


def made(delivery: Delivery, count: int) -> list[Request]:
    return [Request([1], lambda: None, delivery) for _ in range(count)]


def test_many_readers_of_a_loop_are_woken_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    delivery = Delivery()
    requests = made(delivery, 5)

    async def read(request: Request) -> list[str]:
        return [str(piece) async for piece in request]

    async def run() -> tuple[int, list[list[str]]]:
        loop = asyncio.get_running_loop()
        woken: list[Any] = []
        plain = loop.call_soon_threadsafe

        def counted(*given: Any) -> Any:
            woken.append(given)
            return plain(*given)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        readers = [asyncio.create_task(read(request)) for request in requests]
        for text in "abc":
            await asyncio.sleep(0)  # until all of them wait
            await asyncio.sleep(0)
            for request in requests:
                request.push(Piece(text))
            delivery.deliver()
            await asyncio.sleep(0.01)
        for request in requests:
            request.finish(DONE)
        delivery.deliver()
        delivery.deliver()  # nothing is new
        return len(woken), await asyncio.wait_for(asyncio.gather(*readers), 300)

    assert asyncio.run(run()) == (4, [["a", "b", "c"]] * 5)


def test_a_loop_that_was_closed_keeps_no_other_reader_waiting() -> None:
    delivery = Delivery()
    first, second = made(delivery, 2)
    gone = asyncio.new_event_loop()
    waiting = gone.create_task(first.wait())
    gone.call_soon(gone.stop)
    gone.run_forever()
    gone.close()
    read: list[str] = []
    thread = Thread(target=lambda: read.extend(map(str, second)))
    thread.start()
    first.push(Piece("x"))
    for request in (first, second):
        request.push(Piece("y"))
        request.finish(DONE)
    delivery.deliver()
    thread.join(300)
    assert read == ["y"]
    assert first.result(0) == DONE
    waiting.get_coro().close()  # type: ignore[union-attr]


def test_who_ends_with_its_first_token_waits_for_no_step_of_others() -> None:
    heard = Event()
    with lmstate.Engine(ours("llama"), rows=2) as engine:
        stream = engine.submit([1, 2, 3], max_new_tokens=10**6, ignore_eos=True)
        next(iter(stream))
        decode = engine._scheduler._compute
        asked: list[Request] = []

        def held() -> None:
            if asked and asked[0].done:
                heard.wait(60)
            decode()

        async def ask() -> None:
            asked.append(engine.submit([4, 5], max_new_tokens=1))
            await asked[0]
            heard.set()

        engine._scheduler._compute = held  # type: ignore[method-assign]
        asyncio.run(asyncio.wait_for(ask(), 30))
        stream.cancel()


def test_what_is_reused_is_known_before_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, go = ours("llama"), list(range(1, 60)), Event()
    with lmstate.Engine(model) as engine:
        engine.submit(prompt, max_new_tokens=1).result(300)
        read = engine._scheduler._compute
        monkeypatch.setattr(engine._scheduler, "_compute", lambda: go.wait(300) and read())
        request = engine.submit([*prompt, 1, 2, 3], max_new_tokens=1)
        reused = asyncio.run(asyncio.wait_for(request.begun(), 300))
        assert request.progress == (reused, 62)
        go.set()
        assert (reused, request.result(300).usage.reused) == (59, 59)
        request.cancel()


def test_a_request_that_ends_before_it_begins_reuses_nothing() -> None:
    (request,) = made(delivery := Delivery(), 1)

    async def run() -> int:
        waiting = asyncio.create_task(request.begun())
        await asyncio.sleep(0)
        request.finish(DONE)
        delivery.deliver()
        return await asyncio.wait_for(waiting, 300)

    assert asyncio.run(run()) == 0
