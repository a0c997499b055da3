"""The thread of an engine, which owns the model: it runs what others ask for between two steps."""

from __future__ import annotations

import atexit
import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Condition, Event, Thread, current_thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from lmstate.engine.results import EngineClosed
from lmstate.engine.tiers import Tier
from lmstate.engine.workload import Workload
from lmstate.errors import RanksError
from lmstate.threads import release_threads

if TYPE_CHECKING:
    from lmstate.models.model import Model

Result = TypeVar("Result")

CLOSED = "the engine was closed: make another one"
IDLE = 0.05  # seconds between two looks at requests that cannot begin yet; what they wait for wakes the thread before


class EngineThread(ABC):
    """An engine as far as its thread goes: begun by `start_thread`, ended by `close`, by `with` or by being forgotten.

    `_changed` is notified of everything that the thread may wait for.
    """

    _work: Workload

    def __init__(self, model: Model, tier: Tier | None) -> None:
        self.model = model
        self._tier = tier
        self._commands: deque[tuple[Callable[[Model], Any], Future[Any]]] = deque()
        self._changed = Condition()
        self._closed = self._forked = False

    def start_thread(self) -> None:
        """Start it, and wait until it has warmed up."""
        ready = Event()
        arguments = (weakref.ref(self), self._changed, ready, self._tier)
        release_threads()  # the engine's thread has its own from here on
        self._thread = Thread(target=_serve, args=arguments, name="lmstate-engine", daemon=True)
        self._thread.start()
        ready.wait()
        # A daemon thread inside native code while the interpreter goes away can crash it.
        self._at_exit = _closer(weakref.ref(self))
        atexit.register(self._at_exit)
        _engines.add(self)

    # ---- for any thread

    def call(self, function: Callable[[Model], Result]) -> Future[Result]:
        """Run `function(model)` between two steps, on the thread that owns the model."""
        future: Future[Result] = Future()
        with self._changed:
            self.refuse_closed()
            self._commands.append((function, future))
            self._changed.notify_all()
        return future

    def _called(self, function: Callable[[Model], Result]) -> Result:
        return function(self.model) if current_thread() is self._thread else self.call(function).result()

    def close(self) -> None:
        """End all requests as they are, and the thread. Harmless if it was closed."""
        if self._forked:  # the threads, and what they hold, are the parent's
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if current_thread() is not self._thread:
            self._thread.join()
            if self._tier is not None:
                self._tier.close()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        await asyncio.to_thread(self.close)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def refuse_closed(self) -> None:
        """Raise EngineClosed if it was closed, or belongs to another process."""
        if self._forked:
            raise EngineClosed(
                "the engine belongs to the process that made it, and its threads are not in this one, which was forked "
                "from that: make an engine in each process"
            )
        if self._closed:
            raise EngineClosed(self._why_closed())

    @property
    def failure(self) -> RanksError | None:
        """The error that the model was lost with, if it was: the engine is closed then."""
        return self._work.failure

    def _why_closed(self) -> str:
        if self.failure is None:
            return CLOSED
        return f"the engine was closed, for {self.failure}, and make another engine on it"

    def orphan(self) -> None:
        """In a forked child: refuse what would wait for the engine's thread for ever."""
        self._forked = self._closed = True
        self._changed = Condition()  # a thread of the parent may have held the other one

    # ---- for its thread

    @abstractmethod
    def _warm_up(self) -> None:
        """Do what the first request would wait for."""

    @abstractmethod
    def _busy(self) -> bool:
        """Whether there is work, or a command."""

    @abstractmethod
    def _step(self) -> bool:
        """Work for a moment. Returns whether anything could be done."""

    def _turn(self) -> bool:
        """Do what others asked for until now, and a step. Whether anything could be done."""
        asked = len(self._commands)
        for _ in range(asked):
            function, future = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self.model))
                except BaseException as error:
                    if isinstance(error, RanksError):
                        self._work.failure = error
                    future.set_exception(error)
        done = self._step()
        self._close_if_lost()
        return done or asked > 0

    def _look(self) -> None:
        """See whether the model is still there, while there is nothing to do."""
        try:
            self.model.check()
        except RanksError as error:
            self._work.failure = error
        self._close_if_lost()

    def _close_if_lost(self) -> None:
        if self._work.failure is not None:
            with self._changed:
                self._closed = True

    def _shut(self) -> None:
        try:
            self._work.end_all()
        finally:
            while self._commands:
                future = self._commands.popleft()[1]
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineClosed(self._why_closed()))


_engines: weakref.WeakSet[EngineThread] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.orphan()


if hasattr(os, "register_at_fork"):  # where there is a fork
    os.register_at_fork(after_in_child=_after_fork)


def _serve(reference: weakref.ref[EngineThread], changed: Condition, ready: Event, tier: Tier | None) -> None:
    """The engine's thread. It holds the engine only while there is work, so that a forgotten engine can go, and closes
    the tier of one."""
    if (engine := reference()) is not None:
        engine._warm_up()
    del engine
    ready.set()
    with torch.no_grad():
        while True:
            engine = reference()
            if engine is None:
                if tier is not None:
                    tier.close()
                return
            if engine._closed:
                engine._shut()
                return
            if engine._busy():
                if not engine._turn():
                    del engine
                    with changed:
                        changed.wait(IDLE)
            else:
                engine._look()
                del engine
                with changed:
                    engine = reference()
                    if engine is not None and not engine._closed and not engine._busy():
                        del engine
                        changed.wait(1.0)


def _closer(reference: weakref.ref[EngineThread]) -> Callable[[], None]:
    def close() -> None:
        engine = reference()
        if engine is not None:
            with suppress(Exception):
                engine.close()

    return close
