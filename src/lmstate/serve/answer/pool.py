"""The models of a server: each is loaded when it is first asked for, and unloaded to make room for another."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Protocol

from lmstate.ops.memory import spare
from lmstate.serve.answer.service import Service
from lmstate.serve.settings import Settings
from lmstate.serve.wire.errors import ApiError

if TYPE_CHECKING:
    from lmstate.engine.serving import ServingEngine
    from lmstate.engine.tiers import RecordStore

log = logging.getLogger("lmstate.serve")

LOOK = 0.02  # seconds between two looks at whether a model has become idle
SHOWN_NAMES = 20  # of the models that a refusal lists


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded. `nbytes`: of its files; `config`: reads its config.json, without weights."""

    name: str  # that clients ask by
    load: Callable[[], ServingEngine]
    given_name: str | None = None
    nbytes: int = 0
    config: Callable[[], dict[str, Any]] = dict


class Attached(Protocol):
    """Work beside a loaded model's requests: the conversations of the page."""

    @property
    def busy(self) -> bool:
        """Whether it needs the model now."""
        ...

    async def close(self) -> None: ...


class ServedModel:
    """One of the models, loaded or not."""

    def __init__(self, source: ModelSource, settings: Settings, service: Service | None = None) -> None:
        self.source, self.settings, self.service = source, settings, service
        self.attached: Attached | None = None
        self.created = int(time())
        self.leaving = False  # it is to be unloaded: who asks for it now waits until it is loaded again
        self.used = monotonic()
        self.leases = 0
        self.bringing: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def ready(self) -> bool:
        return self.service is not None and not self.leaving

    @property
    def status(self) -> str:
        """In the words of llama-server: loaded, loading or unloaded."""
        return "loaded" if self.ready else "unloaded" if self.bringing is None else "loading"

    @property
    def busy(self) -> bool:
        attached = self.attached is not None and self.attached.busy
        return attached or self.leases > 0 or (self.service is not None and bool(self.service.running))

    def release(self) -> None:
        """End a lease that `ModelPool.lease` gave."""
        self.leases -= 1
        self.used = monotonic()


class ModelPool:
    """Models by name. For the event loop's thread; loading and closing run beside it.

    At most `max_loaded` are loaded at a time (None: all). One that was not asked for `unload_after` seconds is unloaded
    (None: only to make room). A model is unloaded when none of its requests runs; requests for it that come meanwhile
    wait, and so does the model that is to be loaded. `records`: of the engines' store, for all models together.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        settings: Settings,
        max_loaded: int | None = None,
        unload_after: float | None = None,
        records: RecordStore | None = None,
    ) -> None:
        if not sources:
            raise ValueError("a server was asked for without a model; give one or more")
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise ValueError(f"several models are called {max(names, key=names.count)!r}: rename a file or a folder")
        self.settings, self.unload_after, self.records = settings, unload_after, records
        self.models = [
            ServedModel(
                source,
                replace(
                    settings,
                    model_name=source.name,
                    given_name=source.given_name,
                    aliases=() if index else settings.aliases,
                ),
            )
            for index, source in enumerate(sources)
        ]
        self.draining = False
        self._most = len(sources) if max_loaded is None else max_loaded
        self._turn = asyncio.Lock()  # one model at a time is loaded
        self._attach: Callable[[Service], Attached] | None = None

    @staticmethod
    def of(engine: ServingEngine, settings: Settings) -> ModelPool:
        """The pool of one model that is loaded, and stays."""
        source = ModelSource(settings.model_name, lambda: engine, settings.given_name)
        pool = ModelPool([source], settings, records=engine.stored_records())
        pool.models[0].service = Service(engine, pool.models[0].settings)
        return pool

    def attach(self, make: Callable[[Service], Attached]) -> None:
        """Have every loaded model go with what `make` makes of its service."""
        self._attach = make
        for served in self.models:
            if served.service is not None:
                served.attached = make(served.service)

    @property
    def loaded(self) -> Iterator[Service]:
        return (served.service for served in self.models if served.service is not None)

    def find(self, asked: str | None) -> ServedModel:
        """The model that a request names; the first, where it names none. Raises `ApiError` for an unknown name.

        The alias `*` answers to every name.
        """
        if asked is None:
            return self.models[0]
        for served in self.models:
            if served.settings.answers_to(asked):
                return served
        if "*" in self.settings.aliases:
            return self.models[0]
        names = ", ".join(repr(served.name) for served in self.models[:SHOWN_NAMES])
        raise ApiError(
            f"the model {asked[:100]!r} is not served here; {names} {'is' if len(self.models) == 1 else 'are'} "
            "(a server that is started with --alias '*' answers to any name)",
            404,
            param="model",
            code="model_not_found",
        )

    async def lease(self, served: ServedModel) -> Service:
        """The service of a model, loaded if need be. It stays loaded until `release`."""
        while True:
            if served.service is not None and not served.leaving:
                served.leases += 1
                return served.service
            if self.draining:
                raise ApiError("the server is shutting down", 503, code="shutting_down", retry_after=5)
            if served.bringing is None:
                served.bringing = asyncio.create_task(self._bring(served))
            await asyncio.shield(served.bringing)  # others may wait for it too

    async def _bring(self, served: ServedModel) -> None:
        try:
            async with self._turn:
                await self._make_room(served.source.nbytes)
                begun = monotonic()
                try:
                    engine = await asyncio.to_thread(served.source.load)
                except (ValueError, OSError, RuntimeError, MemoryError) as error:
                    log.error("the model %s was not loaded", served.name, exc_info=error)
                    message = f"the model {served.name!r} cannot be loaded; the server's log says why"
                    raise ApiError(message, 500, code="model_not_loaded") from error
                served.service = Service(engine, served.settings)
                served.used = monotonic()
                if self._attach is not None:
                    served.attached = self._attach(served.service)
                log.info("loaded %s in %.1fs", served.name, monotonic() - begun)
        finally:
            served.bringing = None

    async def _make_room(self, nbytes: int) -> None:
        """Unload those not used for the longest, idle ones first, until a model of this size may be loaded."""
        while found := [served for served in self.models if served.ready]:
            if len(found) < self._most and nbytes <= 2 * spare():
                return
            await self._unload(min(found, key=lambda served: (served.busy, served.used)))

    async def _unload(self, served: ServedModel) -> None:
        service = served.service
        assert service is not None
        served.leaving = True
        while served.busy:
            await asyncio.sleep(LOOK)
        served.service, attached, served.attached = None, served.attached, None
        try:
            await _end(service, attached, close_engine=True)
        finally:
            served.leaving = False
        del service, attached
        await asyncio.to_thread(gc.collect)  # an engine's parts know each other
        log.info("unloaded %s", served.name)

    async def watch(self) -> None:
        """Unload models that are not in use. Runs until it is cancelled."""
        while self.unload_after is not None:
            await asyncio.sleep(min(1.0, self.unload_after / 4))
            for served in self.models:
                if served.ready and not served.busy and monotonic() - served.used > self.unload_after:
                    async with self._turn:
                        if served.ready and not served.busy:
                            await self._rest(served)

    async def _rest(self, served: ServedModel) -> None:
        try:
            await self._unload(served)
        except Exception as error:
            log.error("the model %s was not unloaded properly", served.name, exc_info=error)

    def drain(self) -> None:
        """Refuse new requests."""
        self.draining = True
        for service in self.loaded:
            service.drain()

    def cancel_all(self) -> None:
        for service in self.loaded:
            service.cancel_all()

    async def close(self, close_engines: bool) -> None:
        """End all that runs, and unload all."""
        self.drain()
        self.cancel_all()
        bringing = [served.bringing for served in self.models if served.bringing is not None]
        await asyncio.gather(*bringing, return_exceptions=True)
        for served in self.models:
            if served.service is not None:
                await _end(served.service, served.attached, close_engines)


async def _end(service: Service, attached: Attached | None, close_engine: bool) -> None:
    service.drain()
    service.cancel_all()
    if attached is not None:
        await attached.close()
    await service.grammars.close()
    if close_engine:
        await asyncio.to_thread(_close_last, [service.engine])


def _close_last(engines: list[ServingEngine]) -> None:
    """Close an engine that only the list holds: the thread must not keep it alive once its end is told."""
    engines.pop().close()
