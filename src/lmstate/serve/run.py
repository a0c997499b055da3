"""Running the application: uvicorn, with bounds on slow clients, and an end that streams live to see."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmstate.engine.results import EngineClosed
from lmstate.errors import RanksError
from lmstate.serve.app import create_app
from lmstate.serve.settings import Settings
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.workers import Workers

if TYPE_CHECKING:
    from lmstate.engine.serving import ServingEngine
    from lmstate.serve.answer.pool import ModelPool
    from lmstate.serve.answer.service import Service

MOST_HEADER = 2**16
# Connections accepted at a time. Those of a few rounds of the loop are open at once before the bound closes others, and
# asyncio, once it has no more files, tries and logs as many times in a row.
BACKLOG = 128
OWN_FILES = 256 + 4 * BACKLOG  # what is open beside connections: weights, the store, the log; and those rounds
_BUSY = ApiError("the server has as many connections as it takes", 503, code="too_many_connections").openai()
_BODY = json.dumps(_BUSY).encode()
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class Server(uvicorn.Server):
    """uvicorn's server. SIGTERM refuses new requests, lets streams end for a while, then ends them properly."""

    def __init__(self, config: uvicorn.Config, pool: ModelPool, drains: bool = True) -> None:
        """`drains`: the engines end with the server, so that requests are told to go on elsewhere."""
        super().__init__(config)
        self.pool, self._drains = pool, drains
        self.ready: Callable[[int], None] = lambda port: None  # called once it listens, with the port

    async def startup(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().set_default_executor(Workers())
        await super().startup(sockets)
        if self.started:
            self.ready(self.port)

    @property
    def service(self) -> Service:
        """The service of the first model, which is loaded."""
        return next(self.pool.loaded)

    @property
    def port(self) -> int:
        """Port that the server listens on; the one that was free, if 0 was asked for."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    @property
    def failure(self) -> RanksError | None:
        """The error that a model was lost with, upon which the server ends."""
        return next((why for service in self.pool.loaded if (why := service.engine.failure) is not None), None)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.failure is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self.pool.draining
        self.pool.drain()
        if again or sig == signal.SIGINT:
            self.pool.cancel_all()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        self.pool.drain()
        ending = asyncio.create_task(self._end_streams())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_streams(self) -> None:
        """Streams that go on for too long are told that they end: their last events still come."""
        await asyncio.sleep(self.pool.settings.drain)
        if self._drains:
            for service in list(self.pool.loaded):
                with suppress(EngineClosed):
                    await asyncio.to_thread(service.engine.drain)
        self.pool.cancel_all()


def protocol(header_timeout: float, write_timeout: float, most: int) -> type[H11Protocol]:
    """uvicorn's HTTP protocol, which else waits for ever for the head of a request and for the reader of an answer, and
    for any number of them.

    Of more than `most` connections the one that has waited longest for a head is closed; where all are at work, the
    new one gets 503.
    """
    idle: dict[H11Protocol, None] = {}  # connections that wait for a head, the longest first

    class TimedProtocol(H11Protocol):
        _waiting: asyncio.TimerHandle | None = None
        _sending: asyncio.TimerHandle | None = None  # while a client is to take what it was answered

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            idle[self] = None
            self._waiting = self.loop.call_later(header_timeout, self._too_slow)
            if len(self.connections) > most:
                longest = next(iter(idle))
                if longest is self:
                    self.transport.write(FULL)
                del idle[longest]
                longest.transport.close()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_idle():
                if self._waiting is None and not self.transport.is_closing():
                    self._waiting = self.loop.call_later(header_timeout, self._too_slow)
            else:
                idle.pop(self, None)
                self._cancel_timer()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_idle() and not self.transport.is_closing():
                idle[self] = None
            self._watch_reader()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reader()

        def connection_lost(self, exc: Exception | None) -> None:
            idle.pop(self, None)
            self._cancel_timer()
            if self._sending is not None:
                self._sending.cancel()
            super().connection_lost(exc)

        def _unsupported_upgrade_warning(self) -> None:
            """Nothing: HTTP lets an upgrade be ignored, and no library for websockets would change that here."""

        def _watch_reader(self) -> None:
            if self._sending is not None:
                self._sending.cancel()
            left = self.transport.get_write_buffer_size()
            self._sending = self.loop.call_later(write_timeout, self._look, left) if left else None

        def _look(self, before: int) -> None:
            """Drop a client that took nothing of what was left for it: closing would wait for it."""
            if not (self.flow.write_paused or self._is_idle()):
                return  # more is written meanwhile, so that its length tells nothing
            if self.transport.get_write_buffer_size() >= before:
                self.transport.abort()
            else:
                self._watch_reader()

        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _cancel_timer(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _too_slow(self) -> None:
            self._waiting = None
            if self._is_idle():
                self.transport.close()

    return TimedProtocol


def most_connections(wanted: int) -> int:
    """Connections that the limit of open files allows, beside what the server needs for itself; at most `wanted`."""
    try:
        import resource
    except ImportError:  # no such limit on Windows
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(ValueError, OSError):  # a process may raise its own limit up to the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else max(min(wanted, soft - OWN_FILES), 16)


def make_server(models: ServingEngine | ModelPool, settings: Settings, *, close_engine: bool = True) -> Server:
    """A server, not started: `run()` blocks, `await serve()` does not."""
    app = create_app(models, settings, close_engine=close_engine)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol(settings.header_timeout, settings.write_timeout, most_connections(settings.max_connections)),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        proxy_headers=False,
        h11_max_incomplete_event_size=MOST_HEADER,
        timeout_keep_alive=settings.keep_alive,
        timeout_graceful_shutdown=int(settings.drain) + 5,
    )
    return Server(config, app.state.pool, drains=close_engine)
