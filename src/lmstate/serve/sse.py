"""Server-sent events, and answers that end when their client does.

uvicorn drops what is sent to a client that has left without a word, so every answer that takes time listens for the
disconnect beside its work, and cancels the work.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")


class Disconnected(Exception):
    """The client has left; nobody reads an answer."""


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
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


async def until_gone(receive: Receive) -> None:
    """Returns when the client disconnects."""
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
        async def put(message: Message) -> None:
            await asyncio.wait_for(send(message), self.write_timeout)

        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self.headers}
        raw = [(key.encode(), value.encode()) for key, value in headers.items()]
        await put({"type": "http.response.start", "status": 200, "headers": raw})
        following: asyncio.Future[bytes] | None = None
        try:
            while True:
                following = following or asyncio.ensure_future(anext(self.events))
                await asyncio.wait((following,), timeout=self.ping_interval)
                if not following.done():
                    await put({"type": "http.response.body", "body": self.ping(), "more_body": True})
                    continue
                done, following = following, None
                try:
                    body = done.result()
                except StopAsyncIteration:
                    break
                await put({"type": "http.response.body", "body": body, "more_body": True})
            await put({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            await self.events.aclose()  # type: ignore[attr-defined]
