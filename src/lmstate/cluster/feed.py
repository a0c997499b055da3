"""News of the requests of a front, from an engine's thread to an event loop, in one stream for all of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from threading import Lock

from lmstate.cluster.handle import Told, follow
from lmstate.cluster.wire import WireNews, news_to_wire
from lmstate.engine.request import Request
from lmstate.engine.results import Completion, Piece

MOST_FEEDS = 256  # without requests, and without a front that listens: the oldest goes


@dataclass
class Fresh:
    """News of a request that are not sent yet."""

    pieces: list[Piece] = field(default_factory=list)
    outcome: Completion | BaseException | None = None


class Feed:
    """News of a front's requests. A message has all that came since the last one.

    A step of the engine tells of each request by itself. One message, and one call that wakes the loop, is enough for
    all of them. Its methods are for the loop's thread.
    """

    def __init__(self) -> None:
        self._loop, self._some = asyncio.get_running_loop(), asyncio.Event()
        self._lock = Lock()
        self._fresh: dict[str, Fresh] = {}
        self._woken = False  # whether the loop is to take what is fresh
        self._requests: dict[str, tuple[Request, asyncio.Event]] = {}  # and what is set once the outcome was sent
        self._whole: set[str] = set()  # requests of which the first news has all of the prompt
        self._number: int | None = None  # of the last message; None before the front told of the one that it heard
        self._streams = self._open = 0  # streams that began, those that did not end

    @property
    def unused(self) -> bool:
        """Whether it has no requests, and no front listens."""
        return not (self._requests or self._open)

    def follow(
        self, id: str, request: Request, *, whole: bool, answered: Sequence[Sequence[int]] = ()
    ) -> asyncio.Event:
        """Tell of a request from now on. The event is set once its outcome was sent. `answered`: see `follow`."""

        def put(pieces: list[Piece], outcome: Completion | BaseException | None) -> None:
            with self._lock:
                if id not in self._requests:
                    return
                fresh = self._fresh.setdefault(id, Fresh())
                fresh.pieces += pieces
                fresh.outcome = outcome
                woken, self._woken = self._woken, True
            if not woken:
                self._loop.call_soon_threadsafe(self._some.set)

        self._requests[id] = request, (ended := asyncio.Event())
        if whole:
            self._whole.add(id)
        follow(request, answered, put)
        return ended

    def leave(self, id: str) -> None:
        """Tell nothing more of a request."""
        with self._lock:
            del self._requests[id]
            self._fresh.pop(id, None)
        self._whole.discard(id)

    async def messages(self, idle: float, heard: int = 0) -> AsyncIterator[tuple[int, list[tuple[str, WireNews]]]]:
        """(number, news by request), the first one at once, until there were no requests for `idle` seconds.

        A later call ends the stream of an earlier one. `heard`: the number of the last message that the front heard. A
        feed that was let go while it rested, and is made again, goes on after it.
        """
        begins = self._number is None
        self._number = heard if self._number is None else self._number
        self._streams += 1
        self._open += 1
        stream, busy = self._streams, self._loop.time()
        self._some.set()
        try:
            while stream == self._streams and self._loop.time() - busy < idle:
                timer = self._loop.call_later(idle, self._some.set)
                await self._some.wait()
                timer.cancel()
                if stream != self._streams:
                    return
                news = self._taken()
                if self._requests or news:
                    busy = self._loop.time()
                if news or begins:
                    begins = False
                    self._number += 1
                    yield self._number, news
        finally:
            self._open -= 1

    def _taken(self) -> list[tuple[str, WireNews]]:
        self._some.clear()
        with self._lock:
            fresh, self._fresh, self._woken = self._fresh, {}, False
        return [(id, self._news(id, one)) for id, one in fresh.items()]

    def _news(self, id: str, fresh: Fresh) -> WireNews:
        request, ended = self._requests[id]
        prompt = request.prompt if id in self._whole else None
        self._whole.discard(id)
        if fresh.outcome is not None:
            ended.set()
        return news_to_wire(Told(fresh.pieces, request.computed, request.reused, fresh.outcome, prompt))


class Feeds:
    """The feeds of a replica, by the names that fronts give them."""

    def __init__(self) -> None:
        self._feeds: OrderedDict[str, Feed] = OrderedDict()

    def get(self, id: str) -> Feed:
        """The feed of this name, made if there is none."""
        if (feed := self._feeds.get(id)) is None:
            feed = self._feeds[id] = Feed()
        self._feeds.move_to_end(id)
        if len(self._feeds) > MOST_FEEDS:
            unused = [name for name, one in self._feeds.items() if one.unused and one is not feed]
            for name in unused[: len(self._feeds) - MOST_FEEDS]:
                del self._feeds[name]
        return feed
