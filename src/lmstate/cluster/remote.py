"""Replicas in other processes: the side of a front. Calls run on one event loop, on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from lmstate.cluster.handle import Listener, ReplicaLost, Told, Unreached, Work, tell
from lmstate.cluster.parts import WirePart, parts_of, parts_of_file
from lmstate.cluster.pictures import PictureMissing, picture_parts, picture_to_wire, without_copies
from lmstate.cluster.wire import (
    MOST_MESSAGE,
    WireAnswer,
    WireFacts,
    WireFeed,
    WireFile,
    WireHeard,
    WireNews,
    WireNote,
    WirePrompt,
    WireQuestion,
    WireRecord,
    WireView,
    news_of_wire,
    pack,
    unpack,
    work_to_wire,
)
from lmstate.engine.delivery import Delivery
from lmstate.engine.results import EngineError, Load
from lmstate.engine.session_record import Record
from lmstate.errors import EmbeddingsGone
from lmstate.state.media import Media
from lmstate.vision.reader import PicturePrompt

LOG = logging.getLogger(__name__)
LOOK = 0.25  # seconds between two tries to reach a replica
QUIET = 3.0  # seconds without a view after which a replica gets no more requests
SILENT = 20.0  # seconds without a view after which it is taken for lost
CALL = 30.0  # seconds that a question may take
FLUSH = 60.0  # the same beside the seconds of draining
FILE = 3600.0  # the same for a session's file
SENDS = 4  # times that a request is sent whose pictures the replica lets go before it has all

Found = TypeVar("Found")


class Channel(Protocol):
    """Calls to the replica of one rank, by the names of `ServedEngine`'s methods. Raises ReplicaLost."""

    async def call(self, method: str, told: bytes) -> bytes: ...

    def stream(self, method: str, told: bytes) -> AsyncGenerator[bytes]: ...


class CallLoop:
    """An event loop on a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = Thread(target=self._loop.run_forever, name="lmstate-cluster", daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run it, without a result."""
        self._loop.call_soon_threadsafe(self.create, work)

    def create(self, work: Coroutine[Any, Any, Found]) -> asyncio.Task[Found]:
        """Run it. For the loop's thread."""
        self._tasks.add(task := self._loop.create_task(work))
        task.add_done_callback(self._tasks.discard)
        return task

    def start(self, work: Coroutine[Any, Any, Found]) -> Future[Found]:
        """Run it. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Found], seconds: float) -> Found:
        """Wait for its result, on a thread other than the loop's. Raises ReplicaLost after `seconds`."""
        future = self.start(work)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise ReplicaLost(f"a replica did not answer within {seconds:.0f} seconds") from None

    def close(self) -> None:
        """Cancel all that runs, and end the thread."""

        async def end() -> None:
            tasks = [*self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(CALL)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class RemoteErrand:
    """A request at a replica of another process."""

    def __init__(self, replica: RemoteReplica) -> None:
        self.id, self._replica = uuid4().hex, replica

    def cancel(self) -> None:
        self._replica.note(WireNote(self.id, cancel=True))

    def end_thinking(self) -> None:
        self._replica.note(WireNote(self.id, end_thinking=True))

    def read_elsewhere(self, count: int, max_unread: int) -> None:
        self._replica.note(WireNote(self.id, read=count, max_unread=max_unread))


class RemoteReplica:
    """A process of a rank, until it is lost."""

    def __init__(self, channel: Channel, loop: CallLoop, facts: WireFacts, view: WireView) -> None:
        self.id, self.rank, self.namespace, self.rows = facts.id, facts.rank, facts.namespace, facts.rows
        self.facts = facts
        self._channel, self._loop = channel, loop
        self._view, self._quiet = view, False
        self._lost: ReplicaLost | None = None
        self._lock = Lock()
        self._listeners: dict[str, Listener] = {}  # by request
        self._feed, self._heard = uuid4().hex, 0  # the stream of their news, and the number of the last message
        self._hearing: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Task[Any]] = set()  # for what it does beside answers, on the loop

    @property
    def takes(self) -> bool:
        return self._view.takes and not self._quiet

    @property
    def unstored(self) -> int:
        return self._view.unstored

    @property
    def hit_rate(self) -> float | None:
        """Part of the tokens of its prompts that it reused."""
        return self._view.hit_rate

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def submit(self, work: Work, answered: list[list[int]], listener: Listener) -> RemoteErrand:
        """Send a request. Its refusal is the outcome that the listener hears.

        Raises UnsupportedError, ReplicaLost, and ValueError for a request that is too large to send.
        """
        errand = RemoteErrand(self)
        pictures = without_copies(work.prompt.media if isinstance(work.prompt, PicturePrompt) else ())
        told = pack(work_to_wire(work, answered, self.id, errand.id, self._feed))
        if len(told) > MOST_MESSAGE:
            raise ValueError(f"the request has {len(told):,} bytes; a front sends at most {MOST_MESSAGE:,}: shorten it")
        with self._lock:
            self._refuse_lost()
            self._listeners[errand.id] = listener
        self._loop.begin(self._follow(errand, told, pictures))
        return errand

    async def _follow(self, errand: RemoteErrand, told: bytes, pictures: Mapping[str, Media]) -> None:
        if errand.id not in self._listeners:  # it was lost meanwhile
            return
        if self._hearing is None or self._hearing.done():
            self._hearing = self._loop.create(self._hear())
        try:
            for _ in range(SENDS):
                missing = await self._unless_lost(self._answered(errand, told))
                if missing is None:
                    return
                for hash in missing.hashes:
                    await self._send_picture(pictures[hash])
            self._tell(errand.id, Told([], 0, None, missing))
        except ReplicaLost as error:
            self.lose(error)
        except Exception as error:
            LOG.exception("a request could not be sent to a replica")
            self._tell(errand.id, Told([], 0, None, EngineError(f"the request could not be sent: {error}")))

    async def _answered(self, errand: RemoteErrand, told: bytes) -> PictureMissing | None:
        """Have it answer a request, of which `_hear` tells. Returns the refusal if it needs pictures before."""
        stream = self._channel.stream("answer", told)
        try:
            async for data in stream:
                heard = news_of_wire(unpack(data, WireNews))
                if isinstance(heard.outcome, PictureMissing):
                    return heard.outcome
                self._tell(errand.id, heard)
            return None
        finally:
            await stream.aclose()

    async def _hear(self) -> None:
        """Tell the listeners the news of their requests, while there are any."""
        try:
            while self._listeners:
                stream = self._channel.stream("news", pack(WireFeed(self._feed, self._heard)))
                try:
                    async for data in stream:
                        self._take(unpack(data, WireHeard))
                finally:
                    await stream.aclose()
        except ReplicaLost as error:
            self.lose(error)
        except Exception as error:
            LOG.exception("news of a replica could not be taken")
            self.lose(ReplicaLost(f"the news of replica {self.id} failed: {error}"))

    def _take(self, heard: WireHeard) -> None:
        """Raises ReplicaLost for news that do not follow the last ones."""
        if heard.of != self.id:  # as where the request itself comes to the new one: it was not begun here
            raise Unreached(f"replica {self.id} was replaced")
        self._heard += 1
        if heard.number != self._heard:
            raise ReplicaLost(f"a part of the news of replica {self.id} was lost")
        delivery = Delivery()
        try:
            for id, news in heard.news:
                self._tell(id, news_of_wire(news), delivery)
        finally:
            delivery.deliver()

    async def _send_picture(self, media: Media) -> None:
        upload = await self._upload(picture_parts(media))
        told = pack(picture_to_wire(media, self.id, upload))
        unpack(await self._channel.call("picture", told), WireAnswer).read(type(None))

    async def _upload(self, parts: AsyncIterator[bytes]) -> str:
        """Send bytes in parts, each once the one before arrived. Returns the id to name them by."""
        id, start = uuid4().hex, 0
        async for data in parts:
            part = pack(WirePart(self.id, id, start, data))
            try:
                async with asyncio.timeout(CALL):
                    told = await self._channel.call("part", part)
            except TimeoutError:
                raise ReplicaLost(f"replica {self.id} took no part of an upload within {CALL:.0f} seconds") from None
            unpack(told, WireAnswer).read(type(None))
            start += len(data)
        return id

    def load_session(self, name: str, path: Path, salt: str) -> None:
        """Have it make a session of a file, which is sent. Raises as `Engine.load_session`, and ReplicaLost."""

        async def load() -> None:
            upload = await self._upload(parts_of_file(path))
            told = pack(WireFile(self.id, upload, salt, name))
            unpack(await self._channel.call("load", told), WireAnswer).read(type(None))

        self._run(load(), FILE)

    def save_session(self, record: Record, path: Path, salt: str) -> None:
        """Write the file of a record, which it makes, to `path`. Raises as `Engine.save_session`, and ReplicaLost.

        Pictures that it would have to read, and does not have, are sent if the record has their embeddings.
        """
        pictures = {span.media.hash: span.media for span in record.media if span.media.embeddings is not None}

        async def save() -> None:
            for _ in range(SENDS):
                try:
                    await self._saved(record, path, salt)
                    return
                except PictureMissing as error:
                    if not pictures.keys() >= set(error.hashes):
                        raise EmbeddingsGone(
                            f"{error}, which has to read them, and their embeddings were let go"
                        ) from None
                    for hash in error.hashes:
                        await self._send_picture(pictures[hash])
            raise ReplicaLost(f"replica {self.id} let pictures go as fast as they came")

        self._run(save(), FILE)

    async def _saved(self, record: Record, path: Path, salt: str) -> None:
        upload = await self._upload(parts_of(pack(WireRecord(list(record.tokens), record.to_json()))))
        stream = self._channel.stream("save", pack(WireFile(self.id, upload, salt)))
        try:
            with path.open("wb") as file:
                async for told in stream:
                    await asyncio.to_thread(file.write, unpack(told, WireAnswer).read(bytes))
        finally:
            await stream.aclose()

    def _tell(self, id: str, told: Told, delivery: Delivery | None = None) -> None:
        """Tell the listener of a request, if it is there: at once, or for a `delivery`. Raises ReplicaLost if that is
        the outcome."""
        if isinstance(told.outcome, ReplicaLost):
            raise told.outcome
        with self._lock:
            if (listener := self._listeners.get(id)) is not None and told.outcome is not None:
                del self._listeners[id]
        if listener is None:
            return
        own = delivery or Delivery()
        try:
            listener(told, own)
        except Exception as error:
            LOG.exception("news of a replica could not be taken")
            with self._lock:
                self._listeners.pop(id, None)
            listener(Told([], 0, None, EngineError(f"the news of a replica failed: {error}")), own)
        if delivery is None:
            own.deliver()

    def note(self, note: WireNote) -> None:
        """Send a sender's wish, until it arrives or the replica is lost. Wishes may overtake each other."""

        async def send() -> None:
            while not self.lost:
                try:
                    await self._channel.call("note", pack(note))
                    return
                except ReplicaLost as error:
                    LOG.info("a wish did not arrive: %s", error)
                    await asyncio.sleep(LOOK)

        if not self.lost:
            self._loop.begin(send())

    def look(
        self, about: str, kind: type[Found], prompt: PicturePrompt | None = None, salt: str | None = None
    ) -> Found:
        """Ask about its memory, and wait for the answer. Not for the loop's thread."""
        told = WirePrompt() if prompt is None else WirePrompt.of(prompt)
        return self._asked("look", WireQuestion(about, told, salt), kind, CALL)

    def _asked(self, method: str, question: WireQuestion, kind: type[Found], seconds: float) -> Found:
        return unpack(self._run(self._channel.call(method, pack(question)), seconds), WireAnswer).read(kind)

    def _run(self, work: Coroutine[Any, Any, Found], seconds: float) -> Found:
        return self._loop.run(self._unless_lost(work), seconds)

    async def embed(self, tokens: list[int], pooling: str) -> Tensor:
        """As `Engine.embed`, on the loop."""
        asked = pack(WireQuestion("embed", WirePrompt(tokens), pooling=pooling))
        answer = unpack(await self._unless_lost(self._channel.call("embed", asked)), WireAnswer)
        return torch.tensor(answer.read(list[float]))

    async def _unless_lost(self, work: Coroutine[Any, Any, Found]) -> Found:
        """Its result. Raises ReplicaLost as soon as the replica is lost: one that hangs answers no call."""
        task = asyncio.ensure_future(work)
        self._waiting.add(task)
        try:
            if self.lost:
                task.cancel()
            return await task
        except asyncio.CancelledError:
            if (own := asyncio.current_task()) is None or not own.cancelling():
                self._refuse_lost()
            raise
        finally:
            self._waiting.discard(task)

    def load(self) -> Load:
        """As of the last view: the same object until the next one."""
        self._refuse_lost()
        return self._view.load

    def stats(self) -> dict[str, float]:
        return self.look("stats", dict[str, float])

    def drain(self, seconds: float) -> bool:
        return self._asked("drain", WireQuestion("drain", seconds=seconds), bool, seconds + FLUSH)

    def close(self) -> None:
        """Hear no more of it. Its process goes on."""
        self.lose(ReplicaLost(f"replica {self.id} was closed"))

    def see(self, view: WireView | None, quiet: bool = False) -> None:
        """Take a newer view; none if it does not answer."""
        self._view, self._quiet = view or self._view, quiet

    def lose(self, error: ReplicaLost) -> None:
        """Tell all who wait that it is lost."""
        with self._lock:
            self._lost = self._lost or error
            listeners, self._listeners = list(self._listeners.values()), {}
        for listener in listeners:
            tell(listener, Told([], 0, None, error))
        self._loop.begin(self._stop_waiting())

    async def _stop_waiting(self) -> None:
        for task in [*self._waiting, *([] if self._hearing is None else [self._hearing])]:
            task.cancel()

    def _refuse_lost(self) -> None:
        if self._lost is not None:
            raise ReplicaLost(str(self._lost))


async def watch(channel: Channel, loop: CallLoop, add: Callable[[RemoteReplica], object]) -> None:
    """Look at the replica of a rank for ever; `add` each process that takes the place.

    Its views come in streams, which break at once when its process dies, also where it has no requests.
    """
    watched = Watched(channel, loop, add)
    while True:
        views = channel.stream("views", b"")
        try:
            async with asyncio.timeout(QUIET) as limit:
                async for data in views:
                    await watched.seen(unpack(data, WireView))
                    limit.reschedule(asyncio.get_running_loop().time() + QUIET)
            continue  # the stream ended as it should
        except (ReplicaLost, TimeoutError) as error:
            watched.missed(error)
        except ValueError as error:  # of another namespace
            LOG.error("a replica is not used: %s", error)
        finally:
            await views.aclose()
        await asyncio.sleep(LOOK)


class Watched:
    """The process that has a rank, as far as its views tell."""

    def __init__(self, channel: Channel, loop: CallLoop, add: Callable[[RemoteReplica], object]) -> None:
        self._channel, self._loop, self._add = channel, loop, add
        self._replica: RemoteReplica | None = None
        self._at = 0.0  # when there was a view
        self._streams = False  # whether this stream of views had one

    async def seen(self, view: WireView) -> None:
        """Take a view. Raises ReplicaLost, and ValueError for a replica that is not added."""
        replica = self._replica
        if replica is None or replica.lost or replica.id != view.id:
            facts = unpack(await self._channel.call("about", b""), WireFacts)
            before, self._replica = replica, RemoteReplica(self._channel, self._loop, facts, view)
            try:
                self._add(self._replica)
            finally:
                if before is not None:  # its answers go on at the new one
                    before.lose(ReplicaLost(f"replica {before.id} was replaced"))
        assert self._replica is not None
        self._at, self._streams = asyncio.get_running_loop().time(), True
        self._replica.see(view)

    def missed(self, error: ReplicaLost | TimeoutError) -> None:
        """Note that a stream of views broke, or that none came in time."""
        broke, self._streams = self._streams and isinstance(error, ReplicaLost), False
        if (replica := self._replica) is None:
            return
        replica.see(None, quiet=True)
        if broke or asyncio.get_running_loop().time() - self._at > SILENT:
            replica.lose(ReplicaLost(f"replica {replica.id} is silent: {error!r}"))
