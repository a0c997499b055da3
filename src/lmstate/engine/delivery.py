"""Delivery of what a step made to those who wait for it: together, once a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

Waiter: TypeAlias = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]
Tell: TypeAlias = Callable[[], list[Waiter]]


class Delivery:
    """Readers to be told of something new: each is called once, and gives those who wait on event loops. For the
    engine's thread.

    Waking an event loop is a system call, after which that loop and the engine want the interpreter at once: it is done
    once for all that wait on a loop, not once a token.
    """

    def __init__(self) -> None:
        self._fresh: dict[Tell, None] = {}

    def add(self, tell: Tell) -> None:
        self._fresh[tell] = None

    def deliver(self) -> None:
        """Tell them, and wake those who wait."""
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, {}
        waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for tell in fresh:
            for loop, waiter in tell():
                waiting.setdefault(loop, []).append(waiter)
        for loop, waiters in waiting.items():
            with suppress(RuntimeError):  # the loop was closed: no waiter is left
                loop.call_soon_threadsafe(_release, waiters)


def _release(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
