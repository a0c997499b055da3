"""Rank 0's hold of the others: it starts them, tells them what to do, and ends them all when one fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from types import FrameType
from typing import Any, Protocol

import torch

from lmstate.distributed.block_numbers import BlockNumbers
from lmstate.distributed.channel import RankChannel
from lmstate.distributed.group import SocketGroup
from lmstate.distributed.identity import identity
from lmstate.errors import ModelError, RanksError
from lmstate.ops.weights.split import Gathering
from lmstate.state.validate import whole_number

MAX_RANKS = 64
TIMEOUT = 60.0
"""Seconds that the ranks wait for each other: longer than a part of a prompt takes on a busy machine."""
STARTING = 120.0
"""Seconds that a rank may take to import what it needs."""
LOADING = 3600.0
"""Seconds that the others may take to load their parts."""
ENDING = 2.0  # seconds in which a rank ends by itself when its channel closes


class Collectives(Gathering, Protocol):
    """Collectives of the ranks of a model."""

    ranks: int

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor with that of rank 0, on all others."""
        ...


class Ranks:
    """The group of rank 0, and its channels to the others. Calls of several threads follow each other."""

    def __init__(
        self, group: Collectives, channels: Sequence[RankChannel], close: Callable[[], None], timeout: float = TIMEOUT
    ) -> None:
        self.timeout = timeout
        self.group, self.channels = group, list(channels)
        self.lock = threading.RLock()
        self.failure: str | None = None
        self.ids = count()
        self.freed: deque[int] = deque()
        """States without a holder; the others are told with the next command, for a finalizer may run anywhere."""
        self.blocks = BlockNumbers()
        self._inside = 0
        self.close = weakref.finalize(self, close)

    @property
    def count(self) -> int:
        return self.group.ranks

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Do inside what all ranks do; yields whether this is the outermost turn.

        Nothing comes between, an interrupt neither. Whatever but a refusal goes wrong inside `together` ends the ranks.
        """
        with self.lock, uninterrupted():
            if self.failure is not None:
                raise RanksError(self.failure)
            self._inside += 1
            try:
                yield self._inside == 1
            finally:
                self._inside -= 1

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run inside what the others run too, after they were told. An error here leaves them somewhere else."""
        try:
            yield
        except BaseException as error:
            raise self.fail(error) from error

    def check(self) -> None:
        """Raise `RanksError` if a rank has ended. Waits for no other thread."""
        if self.failure is None and self.lock.acquire(blocking=False):
            try:
                if any(channel.readable for channel in self.channels):  # nothing was asked
                    self.fail(RanksError("a rank ended"))
            finally:
                self.lock.release()
        if self.failure is not None:
            raise RanksError(self.failure)

    def tell(self, *message: Any) -> None:
        """Send a command to every other rank. Inside `turn`."""
        with self.together():
            while self.freed:
                self._send("free", self.freed.popleft())
            if ended := self.blocks.ended():
                self._send("let_go", ended)
            self._send(*message)

    def _send(self, *message: Any) -> None:
        for channel in self.channels:
            channel.send(*message)

    def leave(self, why: str) -> None:
        """Have the other ranks say why, and end."""
        for channel in self.channels:
            with suppress(OSError):
                channel.send("leave", why)
        self.failure = self.failure or f"the other processes were sent away: {why}"
        self.close()

    def hear(self, timeout: float) -> list[list[Any]]:
        """One message of each other rank. Raises `ModelError` with what one of them says went wrong."""
        heard = []
        for channel in self.channels:
            with self.together():
                channel.set_timeout(timeout)
                message = channel.receive()
                channel.set_timeout(self.timeout)
                if message is None:
                    raise RanksError("a rank ended")
            if message[0] == "failed":
                self.fail(RanksError(message[1]))
                raise ModelError(f"a rank could not load the model: {message[1]}")
            heard.append(message)
        return heard

    def fail(self, error: BaseException) -> RanksError:
        """End all ranks, and give the error that says so; every later call raises it."""
        if self.failure is None:
            told = [said for channel in self.channels if (said := _last_word(channel))]
            why = told[0] if told else f"{type(error).__name__}: {error}"
            self.failure = (
                f"the model over {self.count} processes was lost, and so are its states ({why}); load it again"
            )
            self.close()
        return RanksError(self.failure)


def _last_word(channel: RankChannel) -> str | None:
    """The last message of a rank that ended, if there is one."""
    try:
        channel.set_timeout(0.2)
        message = channel.receive()
        return str(message[1]) if message is not None and message[0] == "failed" else None
    except (OSError, ValueError):
        return None


def start(ranks: int, timeout: float = TIMEOUT) -> Ranks:
    """Start the other ranks as processes of this machine; each computes on its share of this one's threads.

    Raises `RanksError` where they do not come up in time.
    """
    if whole_number(ranks, "parallel") > MAX_RANKS:
        raise ValueError(f"parallel={ranks} was asked for; there are at most {MAX_RANKS} processes")
    processes: list[subprocess.Popen[bytes]] = []
    channels: list[RankChannel] = []
    sockets: list[socket.socket] = []
    threads = max(1, torch.get_num_threads() // ranks)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        for _ in range(1, ranks):
            (ours, theirs), (data, other) = socket.socketpair(), socket.socketpair()
            channels.append(RankChannel(ours))
            sockets.append(data)
            with theirs, other:
                passed = theirs.fileno(), other.fileno()
                command = [sys.executable, "-m", "lmstate.distributed.follower", *map(str, passed)]
                processes.append(subprocess.Popen(command, pass_fds=passed, env=environment, stdin=subprocess.DEVNULL))
        return led(channels, sockets, threads, timeout, lambda: end(processes, channels, sockets))
    except BaseException:
        end(processes, channels, sockets)
        raise


def led(
    channels: Sequence[RankChannel],
    sockets: Sequence[socket.socket],
    threads: int,
    timeout: float,
    close: Callable[[], None],
) -> Ranks:
    """The hold of ranks 1 and on, each by its channel and its socket for tensors, once all are there.

    threads: that each computes on, this one too. Raises `RanksError` where one does not come up in time.
    """
    ranks = 1 + len(channels)
    for rank, channel in enumerate(channels, 1):
        channel.set_timeout(STARTING)
        if (said := channel.receive()) is None:
            raise RanksError(f"process {rank} of {ranks} did not start; its own message is above")
        if said != ["here", identity()]:
            raise RanksError(
                f"process {rank} of {ranks} is {said[-1]:.200} and process 0 is {identity()}: all need the same; "
                "LMSTATE_OPS=avx2 for all has the same bits on different processors"
            )
        channel.set_timeout(timeout)
        channel.send("begin", rank, ranks, timeout, threads)
    torch.set_num_threads(threads)
    return Ranks(SocketGroup(0, ranks, sockets, timeout), channels, close, timeout)


def end(
    processes: Sequence[subprocess.Popen[bytes]], channels: Sequence[RankChannel], sockets: Sequence[socket.socket]
) -> None:
    """Close channels and sockets, upon which the ranks end; kill those that do not."""
    for channel in channels:
        channel.close()
    for data in sockets:
        data.close()
    for process in processes:
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Have Ctrl-C wait until the end: it only comes in the main thread."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(signal.SIGINT, came[-1])
