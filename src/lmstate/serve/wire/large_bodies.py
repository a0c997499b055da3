"""A bound on the bytes of large bodies that are worked on at a time, and their memory given back afterwards.

A JSON body takes several times its bytes while it is decoded, and up to a hundred times while its text is tokenized.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.workers import return_memory

REST = 1.0  # seconds without large bodies after which memory is given back: the last one is freed by then
LARGE = 2**18  # bytes of a body that counts, and is read beside the event loop: its JSON may take longer than a token


class Share:
    """The bytes of one request's body, as far as they are worked on."""

    def __init__(self, bodies: LargeBodies) -> None:
        self._bodies = bodies
        self.size = 0

    @property
    def alone(self) -> asyncio.Lock:
        """Held while a large body is decoded: one at a time takes less memory, and no longer."""
        return self._bodies.decoding

    def grow(self, size: int) -> None:
        """Raise `ApiError` where a body of this size has no room beside the others."""
        if size > max(self.size, LARGE):
            self._bodies.take(size - self.size)
            self.size = size


current_share: ContextVar[Share] = ContextVar("share")
"""The share of the request that is being answered."""


class LargeBodies:
    """ASGI middleware that has bodies of at most `most` bytes worked on at a time, until they are answered."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self.held = 0
        self.decoding = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        share = Share(self)
        current_share.set(share)
        try:
            await self._app(scope, receive, send)
        finally:
            if share.size:
                self.held -= share.size
                if not self.held:
                    asyncio.get_running_loop().call_later(REST, self._rest)

    def _rest(self) -> None:
        """Give memory back, unless more large bodies came."""
        if not self.held:
            asyncio.get_running_loop().run_in_executor(None, return_memory)

    def take(self, size: int) -> None:
        """Add `size` bytes. Raises `ApiError` if they exceed the limit."""
        if self.held + size > self._most:
            raise ApiError(
                f"the server works on as many bytes of large bodies as it takes ({self._most}): try again in a moment",
                503,
                code="too_many_bodies",
                retry_after=1,
            )
        self.held += size
