"""From ASGI to handlers and back: bodies within limits, and errors as each protocol words them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from lmstate.serve.settings import Settings
from lmstate.serve.wire.body import parse_body
from lmstate.serve.wire.errors import ApiError, as_api_error
from lmstate.serve.wire.large_bodies import LARGE, current_share
from lmstate.serve.wire.multipart import parse_form, read_fields
from lmstate.serve.wire.sse import dumps

log = logging.getLogger("lmstate.serve")

T = TypeVar("T")
Handler = Callable[..., Awaitable[Any]]  # of the service, the request and, where its path has one, the body


def idempotency_key(request: Request, body: Struct) -> str | None:
    """A name for this request and all that repeat it: of its header `Idempotency-Key` and its body."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return None
    if not 1 <= len(given) <= 255:
        raise ApiError("an Idempotency-Key has 1 to 255 characters", param="Idempotency-Key")
    caller = request.headers.get("authorization", "") + request.headers.get("x-api-key", "")
    told = "\0".join((caller, request.url.path, given)).encode()
    return hashlib.sha256(told + b"\0" + msgspec.json.encode(body)).hexdigest()


def error_response(error: Exception, path: str) -> Response:
    api = as_api_error(error)
    if api.status >= 500 and not isinstance(error, ApiError):
        log.error("%s failed", path, exc_info=error)
    return json_response(api.body(path), api.status, api.headers)


def unreadable(error: Exception) -> ApiError:
    """The error for files of the model that cannot be read: the log has it, and its paths."""
    log.error("files of the model cannot be read", exc_info=error)
    return ApiError("files of the model cannot be read; the server's log says why", 500, code="internal_error")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


async def read_body(settings: Settings, request: Request, form: type[T]) -> T:
    """The JSON object of a request as a struct. Raises `ApiError` for what is too long, too slow or no such object."""
    body = await read_bytes(request, settings.max_body, settings.body_timeout)
    if len(body) < LARGE:
        return parse_body(body, form)
    async with current_share.get().alone:
        return await asyncio.to_thread(parse_body, body, form)


async def read_form(settings: Settings, request: Request, form: type[T]) -> T:
    """A form with a file as a struct. Raises `ApiError` as `read_body`."""
    body = await read_bytes(request, settings.max_sound, settings.body_timeout)
    return read_fields(parse_form(body, request.headers.get("content-type", "")), form)


async def read_bytes(request: Request, most: int, seconds: float) -> bytes:
    """Read the body of a request: at most `most` bytes within `seconds`. Raises `ApiError`."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(f"the body is encoded as {encoding[:40]!r}: send it as it is", 415, code="unsupported_encoding")
    too_long = ApiError(f"the body has more than {most} bytes", 413, code="body_too_large")
    share = current_share.get()
    length = request.headers.get("content-length", "")
    if length.isdigit() and len(length) < 20:
        if int(length) > most:
            raise too_long
        share.grow(int(length))
    pieces, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise too_long
                share.grow(size)
                pieces.append(piece)
    except TimeoutError:
        raise ApiError("the body did not come in time", 408) from None
    return b"".join(pieces)
