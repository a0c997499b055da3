"""A request as its sender sees it: safe to wait for and to iterate over from any thread, and from asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from threading import Condition
from typing import Any

from lmstate.engine.results import Completion, Piece


class Request:
    """An answer, or several, in the making. Made by `Engine.submit`.

    Iterate (`for` or `async for`) for pieces as they come, from the first on. `result()` waits for all.
    """

    def __init__(self, prompt: list[int], wake: Callable[[], None]) -> None:
        self.prompt = prompt
        self.cancelled = False
        self.computed = 0  # tokens of the prompt, reused ones included; the engine counts
        self._wake = wake
        self._changed = Condition()
        self._pieces: list[Piece] = []
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._callbacks: list[Callable[[Request], None]] = []

    # ---- for the sender

    @property
    def done(self) -> bool:
        return self._completion is not None or self._error is not None

    @property
    def progress(self) -> tuple[int, int]:
        """(tokens of the prompt that are computed or reused, all of them)."""
        return self.computed, len(self.prompt)

    def cancel(self) -> None:
        """End it within one step, finished "cancelled". What was computed stays reusable."""
        self.cancelled = True
        self._wake()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the completion. Raises what made the request fail, and TimeoutError after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"no result within {timeout} seconds; the request goes on: wait again, or cancel it")
        return self._outcome()

    async def wait(self) -> Completion:
        """`result()` for asyncio."""
        while not self.done:
            await self._more(len(self._pieces), only_end=True)
        return self._outcome()

    def __await__(self) -> Generator[Any, None, Completion]:
        return self.wait().__await__()

    def __iter__(self) -> Iterator[Piece]:
        at = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=at: len(self._pieces) > at or self.done)  # type: ignore[misc]
                new = self._pieces[at:]
            if not new:
                self._outcome()
                return
            yield from new
            at += len(new)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        at = 0
        while True:
            await self._more(at)
            new = self._pieces[at:]
            if not new:
                self._outcome()
                return
            for piece in new:
                yield piece
            at += len(new)

    # ---- for the engine

    def push(self, piece: Piece) -> None:
        with self._changed:
            self._pieces.append(piece)
            self._notify()

    def finish(self, outcome: Completion | BaseException) -> None:
        with self._changed:
            if self.done:
                return
            if isinstance(outcome, BaseException):
                self._error = outcome
            else:
                self._completion = outcome
            self._notify()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def when_done(self, callback: Callable[[Request], None]) -> None:
        """Call it once the request ended, on the engine's thread; at once if it has."""
        with self._changed:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    # ---- the parts of it

    def _outcome(self) -> Completion:
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion

    async def _more(self, at: int, only_end: bool = False) -> None:
        """Wait until there are more than `at` pieces, or no more will come."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if self.done or (not only_end and len(self._pieces) > at):
                    return
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, waiter))
            await waiter

    def _notify(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_release, waiter)


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
