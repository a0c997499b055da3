"""A route as starlette calls it: reads the body, finds and loads the model, words an error in its protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lmstate.serve.answer.handlers import error_response, log, read_body, read_form
from lmstate.serve.answer.paths import Path
from lmstate.serve.answer.pool import ModelPool, ServedModel
from lmstate.serve.answer.service import Service
from lmstate.serve.wire.errors import as_api_error, is_anthropic
from lmstate.serve.wire.sse import Disconnected, EventStream, comment, data, event, unless_gone

TOLD_EVERY, WATCH = 1.0, 0.5  # seconds between two lines of a model that is being loaded; between two looks at one


def endpoint(path: Path) -> Callable[[Request], Awaitable[Any]]:
    """The handler of a path for starlette. Its exceptions become errors of the path's protocol."""

    async def run(request: Request) -> ASGIApp:
        pool: ModelPool = request.app.state.pool
        served = pool.models[0]
        try:
            reader = read_form if path.form else read_body
            body = () if path.body is None else (await reader(pool.settings, request, path.body),)
            if path.whole:
                answer = await path.handler(pool, request, *body)
            else:
                served = pool.find(asked_model(request, *body))
                request.state.served = served
                answer = await _answer(pool, served, path, request, body)
        except (Disconnected, ClientDisconnect):
            answer = Response(status_code=499)  # the client is gone
        except Exception as error:
            answer = error_response(error, path.path)
        if served.service is not None:
            served.service.metrics.http(path.path, getattr(answer, "status_code", 200))
        return answer

    return run


def asked_model(request: Request, body: Any = None) -> str | None:
    """The model that a request names, in its body or its query."""
    named = body.model if body is not None and "model" in body.__struct_fields__ else None
    return named if named is not None else request.query_params.get("model")


async def _answer(pool: ModelPool, served: ServedModel, path: Path, request: Request, body: tuple[Any, ...]) -> ASGIApp:
    if path.watches and served.service is not None and served.ready:
        return await path.handler(served.service, request, *body)
    if path.watches or (path.streams and body[0].stream and not served.ready):
        late = LateStream(pool, served, lambda service: path.handler(service, request, *body), path)
        settings = pool.settings
        return EventStream(late.events(), late.ping, settings.ping_interval, settings.write_timeout, {})
    if served.ready or not body:
        service = await pool.lease(served)
    else:  # all of the body was read, so that what comes now is that the client leaves
        service = await unless_gone(request.receive, pool.lease(served))
    try:
        return Leased(await path.handler(service, request, *body), served)
    except BaseException:
        served.release()
        raise


@dataclass
class Leased:
    """An ASGI answer during which a model stays loaded."""

    answer: Any
    served: ServedModel

    @property
    def status_code(self) -> int:
        return int(getattr(self.answer, "status_code", 200))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.answer(scope, receive, send)
        finally:
            self.served.release()


@dataclass
class LateStream:
    """The events of a model that is not loaded yet: comments tell so until it is, then come those of the handler.

    A path that only watches does not have the model loaded, and does not keep it so.
    """

    pool: ModelPool
    served: ServedModel
    handle: Callable[[Service], Awaitable[Any]]
    path: Path
    _answer: EventStream | None = None

    def ping(self) -> bytes:
        return comment("ping") if self._answer is None else self._answer.ping()

    async def events(self) -> AsyncGenerator[bytes, None]:
        if self.path.watches:
            while not self.served.ready and not self.pool.draining:
                await asyncio.sleep(WATCH)
            if (service := self.served.service) is not None:
                async with aclosing(self._handled(service)) as events:
                    async for part in events:
                        yield part
            return
        leasing, begun = asyncio.ensure_future(self.pool.lease(self.served)), monotonic()
        try:
            while not leasing.done():
                yield comment(f"loading {self.served.name} {monotonic() - begun:.0f}s")
                await asyncio.wait((leasing,), timeout=TOLD_EVERY)
            async with aclosing(self._handled(leasing.result())) as events:
                async for part in events:
                    yield part
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            yield error_event(error, self.path.path)
        finally:
            if not leasing.cancel() and not leasing.cancelled() and leasing.exception() is None:
                self.served.release()

    async def _handled(self, service: Service) -> AsyncGenerator[bytes, None]:
        answer = self._answer = await self.handle(service)
        try:
            async with aclosing(answer.events):
                async for part in answer.events:
                    yield part
        finally:
            answer.closed()


def error_event(error: Exception, path: str) -> bytes:
    """An error in a stream, by the protocol that `path` belongs to."""
    api = as_api_error(error)
    if is_anthropic(path):
        return event("error", api.anthropic())
    if path == "/v1/responses":
        told = {"type": "error", "code": api.code, "message": api.message, "param": api.param, "sequence_number": 0}
        return event("error", told)
    return data(api.openai())
