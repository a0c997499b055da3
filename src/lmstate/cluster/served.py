"""An engine behind a wire: the side of a replica. Each method takes and returns bytes, and raises nothing."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any
from uuid import uuid4

from lmstate.audio.speech import OneOf, SpeechGrammar
from lmstate.cluster.feed import Feeds
from lmstate.cluster.handle import Unreached, submitted
from lmstate.cluster.parts import Uploads, WirePart, parts_of_file
from lmstate.cluster.pictures import KeptPictures, PictureMissing, WirePicture, read_picture
from lmstate.cluster.wire import (
    WireAnswer,
    WireFacts,
    WireFeed,
    WireFile,
    WireGrammar,
    WireHeard,
    WireNews,
    WireNote,
    WireOneOf,
    WireQuestion,
    WireRecord,
    WireSpeech,
    WireView,
    WireWork,
    error_to_wire,
    pack,
    unpack,
    work_of_wire,
)
from lmstate.engine.engine import Engine
from lmstate.engine.request import Request
from lmstate.engine.results import EngineClosed, hit_rate
from lmstate.engine.session_record import Record
from lmstate.errors import EmbeddingsGone, SnapshotError
from lmstate.generation.grammar import Grammar
from lmstate.state.validate import token_ids

STALLED = 60.0  # seconds without a token, while there is work, after which an engine is taken for dead
LOOK, VIEWS = 0.25, 8  # seconds between two views of a stream, and their number
IDLE = 2.0  # seconds without requests after which a stream of news ends
EARLY = 1000  # requests whose notes are kept before they come
DRAIN_BELOW = 600.0  # seconds that draining may be asked to wait


class ServedEngine:
    """An engine as a replica of this rank. Its `id` is another one after each restart."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.engine, self.rank, self.id = engine, rank, uuid4().hex
        self._requests: dict[str, Request] = {}
        self._early: OrderedDict[str, list[WireNote]] = OrderedDict()  # of requests that are not here yet
        self._feeds = Feeds()
        self._uploads, self._pictures = Uploads(), KeptPictures()
        self._takes = True
        self._drained = False
        self._done, self._moved = -1.0, monotonic()  # tokens, and when they were fewer

    async def about(self, told: bytes) -> bytes:
        """`WireFacts`."""
        engine, model = self.engine, self.engine.model
        return pack(
            WireFacts(
                self.id, self.rank, os.getpid(), engine.namespace, engine.rows, model.fingerprint, model.config,
                len(model.blocks), model.max_positions, model.context_size,
                model.weight_totals, sorted(model.eos_ids), model.start_id, model.hears, model.no_pictures,
                model.defaults,
            )
        )  # fmt: skip

    async def views(self, told: bytes) -> AsyncIterator[bytes]:
        """`WireView`s, the first at once, for a few seconds: Ray stops a replica once its streams have ended."""
        for _ in range(VIEWS):
            yield pack(self.view())
            await asyncio.sleep(LOOK)

    def view(self) -> WireView:
        """The replica as it is now."""
        engine, takes = self.engine, self._takes
        try:
            engine.refuse_closed()
        except EngineClosed:
            takes = False
        return WireView(self.id, engine.load(), takes, engine.unstored, hit_rate(engine.stats()))

    async def answer(self, told: bytes) -> AsyncIterator[bytes]:
        """`WireNews` of a `WireWork` that is refused; nothing of another one, whose news are in its feed.

        It lasts as long as the request. Closing it cancels the request.
        """
        try:
            work = unpack(told, WireWork)
            self._refuse_replaced(work.to)
            request = await self._queued(work)
        except Exception as error:
            yield pack(WireNews(error=error_to_wire(error)))
            return
        self._requests[work.id] = request
        for note in self._early.pop(work.id, ()):
            self._note(note)
        feed = self._feeds.get(work.feed)
        try:
            await feed.follow(work.id, request, whole=work.session is not None, answered=work.answered).wait()
        finally:
            feed.leave(work.id)
            del self._requests[work.id]
            self._left(request)

    async def news(self, told: bytes) -> AsyncIterator[bytes]:
        """`WireHeard`s of a `WireFeed`, until it has no requests for a few seconds: see `views`."""
        wanted = unpack(told, WireFeed)
        async for number, news in self._feeds.get(wanted.id).messages(IDLE, wanted.heard):
            yield pack(WireHeard(self.id, number, news))

    async def _queued(self, work: WireWork) -> Request:
        """Submit it on a thread: preparing a prompt takes long. Being cancelled meanwhile cancels it as well."""
        submitting = asyncio.ensure_future(asyncio.to_thread(self._submitted, work))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:

            def left(submitted: asyncio.Future[Request]) -> None:
                if submitted.exception() is None:
                    self._left(submitted.result())

            submitting.add_done_callback(left)
            raise

    def _left(self, request: Request) -> None:
        """Cancel it unless another stream tells of it: two turns of one key are one request."""
        if not (request.done or request in self._requests.values()):
            request.cancel()

    def _submitted(self, told: WireWork) -> Request:
        return submitted(self.engine, work_of_wire(told, self._compiled, self._pictures.placed), told.answered)

    def _compiled(self, grammar: WireGrammar) -> Grammar:
        model = self.engine.model
        match grammar:
            case WireOneOf():
                size = model.config.vocab_size
                return OneOf(size, token_ids(grammar.ids, "the grammar", size))
            case WireSpeech():
                return SpeechGrammar(model.listener().speech, grammar.times)
        return model.grammars.compile(grammar, "grammar")

    async def note(self, told: bytes) -> bytes:
        """Do what a `WireNote` wishes, now or once its request is here."""
        return self._answered(lambda: self._note(unpack(told, WireNote)))

    def _note(self, note: WireNote) -> None:
        if (request := self._requests.get(note.id)) is not None:
            if note.end_thinking:
                request.end_thinking()
            if note.read is not None:
                request.read_elsewhere(note.read, note.max_unread)
            if note.cancel:
                request.cancel()
        else:
            self._early.setdefault(note.id, []).append(note)
            if len(self._early) > EARLY:  # those of requests that have ended
                self._early.popitem(last=False)

    async def look(self, told: bytes) -> bytes:
        """`WireAnswer` to a `WireQuestion`."""
        return await asyncio.to_thread(self._answered, lambda: self._look(unpack(told, WireQuestion)))

    def _look(self, question: WireQuestion) -> Any:
        engine, prompt, salt = self.engine, question.prompt.read(), question.salt
        prompt = replace(prompt, media=self._pictures.known(prompt.media))
        looks: dict[str, Callable[[], Any]] = {
            "at_work": engine.at_work,
            "clear_prefixes": lambda: engine.clear_prefixes(salt),
            "drafts": engine.draft_report,
            "explain": lambda: engine.explain(prompt, salt or ""),
            "held": lambda: engine.held(prompt, salt or ""),
            "prefixes": lambda: engine.prefixes(prompt.identities, salt),
            "resident": engine.resident,
            "rewind_window": lambda: [engine.rewind_window()],
            "stats": engine.stats,
            "tree": lambda: engine.tree(salt),
        }
        if (look := looks.get(question.about)) is None:
            raise ValueError(f"unknown question {question.about!r}; expected one of {sorted(looks)}")
        return look()

    async def embed(self, told: bytes) -> bytes:
        """`WireAnswer`: the numbers of a text's vector."""
        try:
            question = unpack(told, WireQuestion)
            vector = await asyncio.wrap_future(self.engine.embed(question.prompt.ids, question.pooling))
            return pack(WireAnswer(_raw(vector.tolist())))
        except Exception as error:
            return pack(WireAnswer(error=error_to_wire(error)))

    async def part(self, told: bytes) -> bytes:
        """`WireAnswer`: nothing, once a `WirePart` is here."""
        return await asyncio.to_thread(self._answered, lambda: self._part(unpack(told, WirePart)))

    def _part(self, part: WirePart) -> None:
        self._refuse_replaced(part.to)
        self._uploads.add(part)

    async def picture(self, told: bytes) -> bytes:
        """`WireAnswer`: nothing, once the `WirePicture` that was uploaded is kept."""
        return await asyncio.to_thread(self._answered, lambda: self._picture(unpack(told, WirePicture)))

    def _picture(self, told: WirePicture) -> None:
        self._refuse_replaced(told.to)
        with self._uploads.taken(told.id) as path:
            self._pictures.put(read_picture(told, path))

    async def load(self, told: bytes) -> bytes:
        """`WireAnswer`: nothing, once the session of a `WireFile` that was uploaded is here, and in the store."""
        return await asyncio.to_thread(self._answered, lambda: self._load(unpack(told, WireFile)))

    def _load(self, told: WireFile) -> None:
        self._refuse_replaced(told.to)
        with self._uploads.taken(told.id) as path:
            try:
                self.engine.load_session(told.name, path, told.salt)
            except SnapshotError as error:
                raise SnapshotError(str(error).replace(str(path), "the file")) from None

    async def save(self, told: bytes) -> AsyncIterator[bytes]:
        """`WireAnswer`s with the bytes of a file: of the record that a `WireFile` names."""
        try:
            with TemporaryDirectory(prefix="lmstate-save-") as folder:
                path = Path(folder, "session")
                await asyncio.to_thread(self._save, unpack(told, WireFile), path)
                async for data in parts_of_file(path):
                    yield pack(WireAnswer(_raw(data)))
        except Exception as error:
            yield pack(WireAnswer(error=error_to_wire(error)))

    def _save(self, told: WireFile, path: Path) -> None:
        self._refuse_replaced(told.to)
        with self._uploads.taken(told.id) as uploaded:
            given = unpack(uploaded.read_bytes(), WireRecord)
        record = Record.from_json(given.tokens, given.text)
        record.media = list(self._pictures.known(record.media))
        try:
            self.engine.save_session(record, path, told.salt)
        except EmbeddingsGone:
            raise PictureMissing([one.media.hash for one in record.media if one.media.embeddings is None]) from None

    def _refuse_replaced(self, to: str) -> None:
        if to != self.id:
            raise Unreached(f"replica {to} was replaced")

    async def drain(self, told: bytes) -> bytes:
        """`WireAnswer`: whether the store took all, once running requests ended or were told to go on elsewhere."""
        return await asyncio.to_thread(self._answered, lambda: self._drain(unpack(told, WireQuestion)))

    def _drain(self, question: WireQuestion) -> bool:
        self._takes = False
        try:
            return self.engine.drain(min(question.seconds, DRAIN_BELOW))
        finally:
            self._drained = True

    def check_health(self) -> None:
        """Raises RuntimeError once the engine ended, was drained or stands still: it is to be replaced then.

        Ray asks every few seconds; uploads that were abandoned go then.
        """
        self._uploads.drop_abandoned()
        self.engine.refuse_closed()
        if self._drained:
            raise RuntimeError("the engine was drained: a new one takes its place")
        load, stats, now = self.engine.load(), self.engine.stats(), monotonic()
        done = stats["computed_tokens"] + stats["generated_tokens"]
        if done != self._done or not (load.reading or load.answering):
            self._done, self._moved = done, now
        elif now - self._moved > STALLED:
            raise RuntimeError(f"the engine has work, and made no token in {STALLED:.0f} seconds")

    @staticmethod
    def _answered(action: Callable[[], Any]) -> bytes:
        try:
            return pack(WireAnswer(_raw(action())))
        except Exception as error:
            return pack(WireAnswer(error=error_to_wire(error)))


def _raw(found: Any) -> Any:
    import msgspec

    return msgspec.Raw(pack(found))
