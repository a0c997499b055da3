"""One line of the log for each request: its method, path and status, its tokens and its seconds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from lmstate.engine import Request

log = logging.getLogger("lmstate.serve")

SHOWN_PATH = 200  # characters
WATCHED = frozenset({"/health", "/v1/health", "/metrics"})  # asked every few seconds: told at the level "debug" alone

submitted: ContextVar[list[Request] | None] = ContextVar("submitted", default=None)
"""The engine's requests that the HTTP request that is being answered has made; None outside of one."""


class AccessLog:
    """ASGI middleware that logs each request at its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, whole = perf_counter(), 500, False
        made: list[Request] = []

        async def put(message: Message) -> None:
            nonlocal status, whole
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                whole = not message.get("more_body", False)

        submitted.set(made)
        try:
            await self._app(scope, receive, put)
        finally:
            path = quote(scope["path"], safe="/:*~")[:SHOWN_PATH]  # a path may have line breaks
            level = logging.DEBUG if scope["path"] in WATCHED else logging.INFO
            cut = "" if whole else " (cut off)"
            seconds = perf_counter() - begin
            log.log(level, "%s %s %d%s %.3fs%s", scope["method"], path, status, _tokens(made), seconds, cut)
            made.clear()  # the context lives as long as the connection, and a request holds its engine


def _tokens(requests: Sequence[Request]) -> str:
    """The tokens of prompts, of them those that were reused, and of answers."""
    if not requests:
        return ""
    prompt = sum(len(request.prompt) for request in requests)
    reused = sum(request.reused or 0 for request in requests)
    return f" in={prompt} reused={reused} out={sum(request.generated for request in requests)}"
