"""Running the application: uvicorn, with bounds on slow clients, and an end that streams live to see."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmstate.serve.app import create_app
from lmstate.serve.settings import Settings

if TYPE_CHECKING:
    from lmstate.engine import Engine
    from lmstate.serve.service import Service

MOST_HEADER = 2**16


class Server(uvicorn.Server):
    """uvicorn's server. SIGTERM refuses new requests, lets streams end for a while, then ends them properly."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.ready: Callable[[int], None] = lambda port: None  # called once it listens, with the port

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready(self.port)

    @property
    def port(self) -> int:
        """Where it listens: what was asked for, or what was free."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self.service.draining
        self.service.drain()
        if again or sig == signal.SIGINT:
            self.service.cancel_all()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        self.service.drain()
        ending = asyncio.create_task(self._end_streams())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_streams(self) -> None:
        """Streams that go on for too long are told that they end: their last events still come."""
        await asyncio.sleep(self.service.settings.drain)
        self.service.cancel_all()


def protocol(header_timeout: float) -> type[H11Protocol]:
    """uvicorn's HTTP protocol, which else waits for ever for the head of a request."""

    class TimedProtocol(H11Protocol):
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._waiting = self.loop.call_later(header_timeout, self._too_slow)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            idle = self.cycle is None or self.cycle.response_complete
            if not idle and self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
            elif idle and self._waiting is None and not self.transport.is_closing():
                self._waiting = self.loop.call_later(header_timeout, self._too_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
            super().connection_lost(exc)

        def _too_slow(self) -> None:
            self._waiting = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return TimedProtocol


def make_server(engine: Engine, settings: Settings, *, close_engine: bool = True) -> Server:
    """A server, not started: `run()` blocks, `await serve()` does not."""
    app = create_app(engine, settings, close_engine=close_engine)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol(settings.header_timeout),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MOST_HEADER,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(settings.drain) + 5,
    )
    return Server(config, app.state.service)
