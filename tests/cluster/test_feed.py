"""One stream has the news of all requests of a front: none is lost or told twice, whatever becomes of the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from lmstate.cluster import Cluster
from lmstate.cluster.feed import MOST_FEEDS, Feed, Feeds
from lmstate.cluster.moving import MovingRequest
from lmstate.cluster.serving import FrontFiles
from lmstate.cluster.wire import WireNews
from lmstate.engine import Engine, EngineClosed, Request, delivery
from lmstate.engine.delivery import Delivery
from lmstate.engine.results import Piece
from tests.cluster.helpers import LocalChannel, fleet
from tests.cluster.test_front import GIVEN, check
from tests.engine.test_batching import prompt
from tests.waiting import GUARD, wait_until
from tests.zoo import ours

Messages = AsyncIterator[tuple[int, list[tuple[str, WireNews]]]]


async def told(messages: Messages) -> dict[str, list[int]]:
    """The tokens of the next message, by request."""
    _, news = await asyncio.wait_for(anext(messages), GUARD)
    return {id: [token for piece in one.pieces for token in piece.tokens] for id, one in news}


def test_a_message_has_all_that_came_since_the_last_one() -> None:
    async def run() -> None:
        feed, delivery = Feed(), Delivery()
        requests = {id: Request([7], lambda: None, delivery) for id in "abc"}
        first = feed.messages(GUARD)
        assert await told(first) == {}, "a front hears at once whose stream it is"
        ended = {id: feed.follow(id, request, whole=id == "a") for id, request in requests.items()}
        for token in (1, 2):
            for request in requests.values():
                request.push(Piece("x", 0, [token], start=token - 1))
            delivery.deliver()
        assert await told(first) == {id: [1, 2] for id in "abc"}
        requests["a"].push(Piece("x", 0, [3], start=2))
        requests["a"].finish(EngineClosed("it ends"), delivery)
        requests["b"].push(Piece("x", 0, [3], start=2))
        delivery.deliver()
        assert not ended["a"].is_set(), "nobody was told"
        second = feed.messages(GUARD)  # the front lost the first stream
        feed.leave("b")
        assert await told(second) == {"a": [3]} and ended["a"].is_set() and not ended["c"].is_set()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(first), GUARD)

    asyncio.run(run())


def test_a_stream_ends_once_it_was_idle() -> None:
    async def run() -> None:
        feed, request = Feed(), Request([7], lambda: None, delivery := Delivery())
        feed.follow("a", request, whole=True)
        request.push(Piece("x", 0, [1]))
        delivery.deliver()
        messages = feed.messages(0.05)
        (number, ((_, news),)) = await anext(messages)
        assert (number, news.prompt) == (1, [7])
        coming = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0.2)
        assert not coming.done() and not feed.unused, "a request may take its time"
        feed.leave("a")
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(coming, GUARD)
        assert feed.unused

    asyncio.run(run())


def test_unused_feeds_go() -> None:
    async def run() -> None:
        feeds = Feeds()
        used, old = feeds.get("used"), feeds.get("old")
        used.follow("a", Request([7], lambda: None, Delivery()), whole=False)
        for number in range(MOST_FEEDS):
            feeds.get(str(number))
        assert feeds.get("used") is used and feeds.get("old") is not old

    asyncio.run(run())


def test_a_front_whose_feed_was_let_go_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """More fronts than feeds that are kept: the one that rested hears of its next request all the same."""
    monkeypatch.setattr("lmstate.cluster.feed.MOST_FEEDS", 1)
    monkeypatch.setattr("lmstate.cluster.served.IDLE", 0.02)
    with Engine(model := ours("llama")) as alone, fleet(Engine(model)) as (first, channels):
        feeds = channels[0].served._feeds
        with Cluster(channels, FrontFiles(), None) as second:
            for number, cluster in enumerate((first, second, first, second)):
                answer = cluster.front.submit(prompt(20, number), max_new_tokens=6, ignore_eos=True)
                check(answer, alone.submit(prompt(20, number), max_new_tokens=6, ignore_eos=True))
                assert isinstance(answer, MovingRequest) and answer.moves == 0
                wait_until(lambda: all(feed.unused for feed in feeds._feeds.values()))
            assert len(feeds._feeds) == 1 and first.front.lost == second.front.lost == 0


def test_a_message_wakes_the_readers_of_a_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes: list[int] = []
    release = delivery._release

    def counted(waiters: list[asyncio.Future[None]]) -> None:
        wakes.append(len(waiters))
        release(waiters)

    async def read(request: Request) -> int:
        return len([piece async for piece in request])

    async def run(requests: list[Request]) -> None:
        wakes.clear()
        await asyncio.wait_for(asyncio.gather(*map(read, requests)), GUARD)

    monkeypatch.setattr(delivery, "_release", counted)
    with fleet(Engine(ours("llama"), rows=4)) as (cluster, (channel,)):
        asked = [cluster.front.submit(prompt(20, at), max_new_tokens=60, ignore_eos=True) for at in range(4)]
        asyncio.run(run(asked))
        ends = len(asked)  # each is told of beside the message that it came with
        assert len(wakes) <= channel.calls["news"] + ends, "a message has the news of all"


@pytest.mark.parametrize("lost", [1, 2, 9])
def test_an_answer_goes_on_exactly_after_a_message_was_lost(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = ours("llama"), prompt(90, 1)
    given = {**GIVEN, "max_new_tokens": 60}
    dropped: list[int] = []
    stream = LocalChannel.stream

    async def losing(channel: LocalChannel, method: str, asked: bytes) -> AsyncIterator[bytes]:
        seen = 0
        async for data in stream(channel, method, asked):
            seen += method == "news"
            if seen == lost and not dropped:
                dropped.append(seen)
            else:
                yield data

    monkeypatch.setattr(LocalChannel, "stream", losing)
    with Engine(model) as alone, fleet(Engine(model), Engine(model)) as (cluster, _):
        answer = cluster.front.submit(ids, **given)
        check(answer, alone.submit(ids, **given))
        assert dropped and isinstance(answer, MovingRequest) and answer.moves == 1
