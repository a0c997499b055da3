"""Responses that are computed whether or not a client waits, and followed by their id from any event on."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lmstate.serve.wire.tenants import caller

STILL_SECONDS = 20.0  # between two times that others are told that a response is made still
ENDED = 64  # responses whose events can still be followed after their end


@dataclass
class BackgroundResponse:
    """One of them. `shown` is the response as it stands; event n of the stream is `events[n]`."""

    id: str
    shown: Callable[[], dict[str, Any]]
    cancel: Callable[[], None]
    events: list[bytes] = field(default_factory=list)
    done: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, events: AsyncIterator[bytes]) -> None:
        try:
            async for event in events:
                self.events.append(event)
                self._tell()
        finally:
            self.done = True
            self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """The events that come after number `after`, up to the end. Closing it cancels nothing."""
        at = after + 1
        while True:
            changed = self._changed
            for event in self.events[at:]:
                yield event
                at += 1
            if self.done and at >= len(self.events):
                return
            if at >= len(self.events):
                await changed.wait()

    async def ended(self) -> None:
        while not self.done:
            await self._changed.wait()


class BackgroundResponses:
    """Those that are running, and the latest that ended, each by the id that its owner knows. For one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._known: OrderedDict[str, BackgroundResponse] = OrderedDict()

    def start(
        self, response: BackgroundResponse, events: AsyncIterator[bytes], still_made: Callable[[], Awaitable[None]]
    ) -> None:
        """`still_made` is called from time to time until it has ended."""
        task, id = asyncio.create_task(_run(response, events, still_made)), caller().stored(response.id)
        self._tasks[id] = task
        self._known[id] = response
        task.add_done_callback(lambda _: self._forget(id))

    def _forget(self, id: str) -> None:
        self._tasks.pop(id, None)
        ended = [known for known in self._known if known not in self._tasks]
        for known in ended[: max(len(ended) - ENDED, 0)]:
            del self._known[known]

    def get(self, id: str) -> BackgroundResponse | None:
        return self._known.get(caller().stored(id))

    def running(self, id: str) -> BackgroundResponse | None:
        known = self.get(id)
        return None if known is None or known.done else known

    def drop(self, id: str) -> None:
        """Forget one that ended."""
        self._known.pop(caller().stored(id), None)

    async def close(self) -> None:
        """Wait until those that run have ended: cancel their requests before."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def _run(
    response: BackgroundResponse, events: AsyncIterator[bytes], still_made: Callable[[], Awaitable[None]]
) -> None:
    async def tell() -> None:
        while True:
            await asyncio.sleep(STILL_SECONDS)
            await still_made()

    telling = asyncio.create_task(tell())
    try:
        await response.run(events)
    finally:
        telling.cancel()
        with suppress(asyncio.CancelledError):
            await telling
