"""Replicas behind a wire in this process, that can die as a process does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager

from lmstate.cluster import Cluster
from lmstate.cluster.handle import ReplicaLost, Unreached
from lmstate.cluster.served import ServedEngine
from lmstate.cluster.serving import FrontFiles
from lmstate.cluster.wire import WireHeard, WireWork, unpack
from lmstate.engine import Engine


class LocalChannel:
    """Calls to an engine of this process. `dies_after`: tokens of an answer after which it is dead. `deaf`: no note
    arrives. `unreached`: so many requests do not arrive. `hangs`: methods that give no answer. `dies_in`: a method, and
    whether it is done before the death."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.served, self.dead, self.dies_after = ServedEngine(engine, rank), False, -1
        self.taken, self.deaf, self.unreached = 0, False, 0
        self.calls, self.hangs = Counter[str](), set[str]()
        self.told = Counter[str]()  # tokens of each request
        self.sounds = Counter[bytes]()  # requests about each window of a sound
        self.dies_in: tuple[str, bool] | None = None

    async def call(self, method: str, told: bytes) -> bytes:
        if self.dead or (self.deaf and method == "note"):
            raise ReplicaLost("it is dead")
        self.calls[method] += 1
        if method in self.hangs:
            await asyncio.Event().wait()
        if self.dies_in == (method, False):
            self.dead = True
            raise ReplicaLost("it died")
        found: bytes = await getattr(self.served, method)(told)
        if self.dies_in == (method, True):
            self.dead = True
            raise ReplicaLost("it died")
        return found

    async def stream(self, method: str, told: bytes) -> AsyncGenerator[bytes]:
        if self.dead:
            raise ReplicaLost("it is dead")
        if method == "answer" and self.unreached:
            self.unreached -= 1
            raise Unreached("it was replaced")
        if method in self.hangs:
            await asyncio.Event().wait()
        if method == "answer":
            self.taken += 1
            asked = unpack(told, WireWork).prompt
            if asked is not None and asked.sound is not None:
                self.sounds[asked.sound.values] += 1
        served = self.served
        async for data in getattr(served, method)(told):
            self.calls[method] += 1
            if method == "news":
                for id, news in unpack(data, WireHeard).news:
                    self.told[id] += sum(len(piece.tokens) for piece in news.pieces)
                    self.dead = self.dead or 0 <= self.dies_after < self.told[id]
            if self.dead or served is not self.served:
                raise ReplicaLost("it died")
            yield data


@contextmanager
def fleet(
    *engines: Engine, store: str | None = None, files: FrontFiles | None = None
) -> Iterator[tuple[Cluster, list[LocalChannel]]]:
    """A cluster of these engines, which end with it."""
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine)
        channels = [LocalChannel(engine, rank) for rank, engine in enumerate(engines)]
        yield stack.enter_context(Cluster(channels, files or FrontFiles(), store)), channels
