"""The id of a request: in the headers of its answer, and in the lines that the log has about it."""

from __future__ import annotations

import logging
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmstate.serve.wire.errors import current_id, is_anthropic
from lmstate.serve.wire.ids import new_id

OPENAI, ANTHROPIC = "x-request-id", "request-id"  # the headers that the protocols' clients read
PLAIN = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")  # of a client's own ids, which go to the log as they are


class RequestIds:
    """ASGI middleware that gives every request an id: the one that its client sent, where that is plain, or a new one.

    Log lines of the request, also in tasks and threads that it begins, start with the id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(OPENAI, "")
        id = given if PLAIN.fullmatch(given) else new_id("req_")
        names = (OPENAI, ANTHROPIC) if is_anthropic(scope["path"]) else (OPENAI,)

        async def put(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name in names:
                    headers[name] = id
            await send(message)

        current_id.set(id)
        await self._app(scope, receive, put)


def _name(record: logging.LogRecord) -> bool:
    if id := current_id.get():
        record.msg = f"[{id}] {record.msg}"
    return True


logging.getLogger("lmstate.serve").addFilter(_name)
