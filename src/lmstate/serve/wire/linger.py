"""Answers that come before all of their request has: the server reads the rest of it before it closes the connection.

One that is closed with unread bytes is reset, and a client that sends until the end never sees the answer.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST = 2**26  # bytes that are read for nothing
FEW = 2**16  # bytes that are waited for to keep a connection


class Linger:
    """ASGI middleware that holds back the end of an answer, for at most `seconds`, until its request has come."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (body := Body.of(Headers(scope=scope), receive)) is None:
            await self._app(scope, receive, send)
            return

        async def put(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] == 408:  # it has been waited for
                    body.coming = False
                if body.left > FEW or body.ambiguous:
                    MutableHeaders(scope=message)["connection"] = "close"
            elif body.coming and not message.get("more_body", False):
                await send({**message, "more_body": True})  # all of it, as its content-length says
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._seconds):
                        await body.drain()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, body.receive, put)


class Body:
    """The rest of a request's body: `left` bytes, infinite if it does not say how many; whether they are `coming`.

    `ambiguous`: it says so in two ways, which a proxy before this server may read otherwise (RFC 9112, section 6.1):
    nothing more is read from that connection.
    """

    def __init__(self, receive: Receive, left: float, coming: bool, ambiguous: bool = False) -> None:
        self.left = left
        self.ambiguous = ambiguous
        self.coming = coming
        self._receive = receive

    @staticmethod
    def of(headers: Headers, receive: Receive) -> Body | None:
        """None for a request without one."""
        length, chunked = headers.get("content-length", "0"), "transfer-encoding" in headers
        left = float(length) if length.isdigit() and not chunked else float("inf")
        # A client that asks whether to send does not, unless the body is asked for.
        both = chunked and "content-length" in headers
        return Body(receive, left, "expect" not in headers, both) if left else None

    async def receive(self) -> Message:
        message = await self._receive()
        self.coming = message.get("more_body", False)
        self.left = self.left - len(message.get("body", b"")) if self.coming else 0
        return message

    async def drain(self) -> None:
        """Read the rest, up to a limit."""
        size = 0
        while self.coming and size <= MOST:
            size += len((await self.receive()).get("body", b""))
