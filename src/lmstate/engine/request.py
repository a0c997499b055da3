"""A request as its sender sees it: safe to wait for and to iterate over from any thread, and from asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from threading import Condition, Event, Lock
from typing import Any, TypeAlias

from lmstate.engine.delivery import Delivery, Waiter
from lmstate.engine.results import Completion, Piece
from lmstate.errors import UnsupportedError
from lmstate.generation.thinking import ThinkingFormat

Reader: TypeAlias = "Callable[[list[Piece], Completion | BaseException | None], None]"


class Request:
    """An answer, or several, in the making. Made by `Engine.submit`.

    Iterate (`for` or `async for`) for pieces as they come, from the first on. `result()` waits for all.
    """

    def __init__(
        self,
        prompt: list[int],
        wake: Callable[[], None],
        delivery: Delivery,
        thinking: Callable[[], ThinkingFormat] | None = None,
    ) -> None:
        """`thinking`: the format of the model's thinking sections; raises UnsupportedError if it has none."""
        self.prompt = prompt
        self.cancelled = False
        self.computed = 0  # tokens of the prompt, reused ones included; the engine counts
        self.beginning: list[Piece] = []  # what its answers began with elsewhere: its own pieces are those that follow
        self.reused: int | None = None  # tokens of the prompt that were not computed again; None before it is begun
        self.end_of_thinking: ThinkingFormat | None = None  # set where the section is to end now
        self.max_unread: int | None = None  # pieces that a reader may leave unread before the answers rest; None: any
        self._read: int | None = None  # pieces that a reader has taken; None before there is a reader
        self._resting = False
        self._wake, self._delivery, self._thinking = wake, delivery, thinking
        self._changed = Condition()
        # Who waits for the end alone is not woken at each token: the engine's thread would wait for the interpreter.
        self._over = Event()
        self._pieces: list[Piece] = []
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._waiters: list[tuple[Waiter, bool]] = []  # and whether it waits for the end alone
        self._callbacks: list[Callable[[Request], None]] = []
        self._readers: list[tuple[Reader, list[int]]] = []  # who follow it, and how many pieces each has; one at a time
        self._following = Lock()

    # ---- for the sender

    @property
    def done(self) -> bool:
        return self._completion is not None or self._error is not None

    def __repr__(self) -> str:
        done = "failed" if self._error is not None else "ended" if self._completion is not None else "running"
        return f"Request({done}: {self.computed} of {len(self.prompt)} prompt tokens, {self.generated} generated)"

    @property
    def progress(self) -> tuple[int, int]:
        """(tokens of the prompt that are computed or reused, all of them)."""
        return self.computed, len(self.prompt)

    @property
    def generated(self) -> int:
        """Tokens of its answers so far."""
        return sum(len(piece.tokens) for piece in self._pieces)

    def cancel(self) -> None:
        """End it within one step, finished "cancelled". The computed part stays reusable."""
        self.cancelled = True
        self._wake()

    def end_thinking(self) -> None:
        """Have its answers end their thinking sections within one step, and go on with what follows.

        Raises UnsupportedError if the model's chat template has no thinking section.
        """
        if self._thinking is None:
            raise UnsupportedError("the end of a thinking section was asked for; this request can have none")
        self.end_of_thinking = self._thinking()
        self._wake()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the completion. Raises what made the request fail, and TimeoutError after `timeout` seconds."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"no result within {timeout} seconds; the request goes on: wait again, or cancel it")
        return self._outcome()

    async def wait(self) -> Completion:
        """`result()` for asyncio."""
        await self._until(lambda: False, only_end=True)
        return self._outcome()

    async def begun(self) -> int:
        """Wait until its prompt is begun; return how many of its tokens are reused. One that ends before reuses 0."""
        await self._until(lambda: self.reused is not None)
        return self.reused or 0

    def __await__(self) -> Generator[Any, None, Completion]:
        return self.wait().__await__()

    def __iter__(self) -> Iterator[Piece]:
        at = self._taken(0)
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=at: len(self._pieces) > at or self.done)  # type: ignore[misc]
                new = self._pieces[at:]
            if not new:
                self._outcome()
                return
            for piece in new:
                yield piece
                at = self._taken(at + 1)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        at = self._taken(0)
        while True:
            await self._until(lambda at=at: len(self._pieces) > at)  # type: ignore[misc]
            new = self._pieces[at:]
            if not new:
                self._outcome()
                return
            for piece in new:
                yield piece
                at = self._taken(at + 1)

    # ---- for the engine

    def read_elsewhere(self, count: int, max_unread: int) -> None:
        """Note that a reader in another process has taken `count` pieces, and leaves at most `max_unread` unread.

        Notes may come in any order: a smaller count than the last one changes nothing. One below 0 counts pieces of an
        earlier part of the answer that are unread.
        """
        self.max_unread = max_unread
        self._taken(count if self._read is None else max(count, self._read))

    def rests(self) -> bool:
        """Whether its reader is too far behind, until it has read half of what may be. For the engine's thread."""
        if self.max_unread is None or self._read is None:
            return False
        self._resting = len(self._pieces) - self._read > (self.max_unread // 2 if self._resting else self.max_unread)
        return self._resting

    def begin(self, reused: int) -> None:
        """Note that its prompt is read from now on; `reused` of its tokens are stored already."""
        self.reused = reused
        self._delivery.add(self.tell)

    def push(self, piece: Piece) -> None:
        """One more piece, which its readers hear of with the next delivery."""
        self._pieces.append(piece)
        self._delivery.add(self.tell)

    def tell(self) -> list[Waiter]:
        """Wake the threads that wait for what is new; returns those who wait on event loops."""
        with self._changed:
            self._changed.notify_all()
            told = [waiter for waiter, only_end in self._waiters if self.done or not only_end]
            self._waiters = [entry for entry in self._waiters if not self.done and entry[1]]
        self._tell_readers()
        return told

    def finish(self, outcome: Completion | BaseException, delivery: Delivery | None = None) -> None:
        """End it. `delivery`: one of another thread's own, where it is not the engine's thread that calls."""
        with self._changed:
            if self.done:
                return
            if isinstance(outcome, BaseException):
                self._error = outcome
            else:
                self._completion = outcome
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        (self._delivery if delivery is None else delivery).add(self.tell)
        if delivery is not None:
            delivery.deliver()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # of the caller of this request: the others go on
                logging.getLogger(__name__).exception("what was to be called at the end of a request failed")

    def when_done(self, callback: Callable[[Request], None]) -> None:
        """Call it once the request ended, on a thread of the engine's; at once if it has."""
        with self._changed:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def follow(self, reader: Reader) -> None:
        """Call `reader(pieces, outcome)` at each delivery, on the thread that delivers; it must not wait.

        pieces   those since the last call, from the first one on
        outcome  what `result` returns or raises, in the last call; None before
        """
        with self._following:
            self._readers.append((reader, [0]))
        self._tell_readers()

    # ---- the parts of it

    def _taken(self, count: int) -> int:
        self._read = count
        if self._resting:
            self._wake()
        return count

    def _tell_readers(self) -> None:
        with self._following:
            if not self._readers:
                return
            outcome = self._completion if self._error is None else self._error
            for reader, followed in self._readers:
                pieces = self._pieces[followed[0] :]  # all of them if there is an outcome
                followed[0] += len(pieces)
                try:
                    reader(pieces, outcome)
                except Exception:  # of the reader: the engine goes on
                    logging.getLogger(__name__).exception("what follows a request failed")
            if outcome is not None:
                self._readers.clear()

    def _outcome(self) -> Completion:
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion

    async def _until(self, reached: Callable[[], bool], only_end: bool = False) -> None:
        """Wait until something that was told of is `reached`, or the request is done."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if self.done or reached():
                    return
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters.append(((loop, waiter), only_end))
            await waiter
