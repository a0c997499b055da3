"""Server-sent events, and answers that end when their client does.

uvicorn drops what is sent to a client that has left without a word, so every answer that takes time listens for the
disconnect beside its work, and cancels the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")


class Disconnected(Exception):
    """Raised when the client has left before the answer."""


def data(value: Any) -> bytes:
    """One event with JSON for its data."""
    return b"data: " + dumps(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """One named event."""
    return b"event: " + name.encode() + b"\n" + data(value)


def comment(text: str) -> bytes:
    """A line that clients skip: it keeps connections open."""
    return b": " + text.encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    # Half a surrogate pair cannot come in; the model's text is valid as the tokenizer decodes it.
    return msgspec.json.encode(value)


async def until_gone(receive: Receive) -> None:
    """Wait for the client to disconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; raises `Disconnected`, with the work cancelled, when the client leaves first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


@dataclass
class EventStream:
    """An ASGI answer of server-sent events.

    `events` yields bytes; it is closed (and with it, what it computes cancelled) when the client leaves, or takes
    nothing for `write_timeout` seconds. While nothing comes for `ping_interval` seconds, `ping` gives a line that says
    the server still works. `closed` is called at the end, whatever the end was.
    """

    events: AsyncIterator[bytes]
    ping: Callable[[], bytes]
    ping_interval: float
    write_timeout: float
    headers: dict[str, str]
    closed: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except (Disconnected, TimeoutError):
            pass
        finally:
            self.closed()

    async def _send(self, send: Send) -> None:
        output = _Output(send)
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self.headers}
        headers["x-accel-buffering"] = "no"  # nginx else collects events before it passes them on
        raw = [(key.encode(), value.encode()) for key, value in headers.items()]
        await output.put({"type": "http.response.start", "status": 200, "headers": raw})
        writing, watching = asyncio.create_task(self._write(output)), asyncio.create_task(self._watch(output))
        try:
            await asyncio.wait((writing, watching), return_when=asyncio.FIRST_COMPLETED)
            (writing if writing.done() else watching).result()
        finally:
            for task in (writing, watching):
                task.cancel()
            await asyncio.gather(writing, watching, return_exceptions=True)

    async def _write(self, output: _Output) -> None:
        """Send the events as they come. One task for all of them: many streams of many tokens go through here."""
        try:
            async for body in self.events:
                await output.body(body)
            await output.put({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.events.aclose()  # type: ignore[attr-defined]

    async def _watch(self, output: _Output) -> None:
        """Ping a client that waits. Raises `TimeoutError` when one takes nothing: a timer a message would cost more."""
        while True:
            left = output.last + (self.write_timeout if output.busy else self.ping_interval) - monotonic()
            if left > 0:
                await asyncio.sleep(min(left, self.write_timeout, self.ping_interval))
            elif output.busy:
                raise TimeoutError
            else:
                async with asyncio.timeout(self.write_timeout):
                    await output.body(self.ping())


class _Output:
    """The way to the client: whether a message is on it, and since when there has been none, or that one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.busy = False
        self.last = monotonic()

    async def put(self, message: Message) -> None:
        self.busy, self.last = True, monotonic()
        await self._send(message)
        self.busy = False

    async def body(self, body: bytes) -> None:
        await self.put({"type": "http.response.body", "body": body, "more_body": True})
