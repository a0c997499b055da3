"""Answers of conversations while they are written: taken from the engine, shown, and stored from time to time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from lmstate.engine.results import Drained, Piece
from lmstate.engine.session_record import Moment
from lmstate.serve.answer.answers import Answer, usage_details
from lmstate.serve.answer.handlers import log
from lmstate.serve.answer.messages import Prompt
from lmstate.serve.answer.service import Service, ToolUse
from lmstate.serve.conversations.branch_prompts import BranchPrompts
from lmstate.serve.conversations.live import Live
from lmstate.serve.conversations.markdown import GrowingMarkdown, render_blocks
from lmstate.serve.conversations.store import STILL_SECONDS, ConversationMoved, ConversationStore
from lmstate.serve.conversations.tree import Conversation, MessageNode
from lmstate.serve.wire.errors import ApiError, as_api_error
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.owned_records import STORE_ERRORS, OwnedRecords
from lmstate.serve.wire.tenants import caller
from lmstate.state.media import Spans
from lmstate.vision.reader import PicturePrompt

if TYPE_CHECKING:
    from lmstate.engine import Request

SAVED_EVERY, SHARE = 1.0, 50  # seconds between two savings of an answer that is being written, or times their cost
FIRST_RETRY, LAST_RETRY, CLOSING_RETRY = 0.5, 30.0, 0.1  # seconds before what could not be saved is saved again
FINISHED = {"eos": "done", "stop": "done", "length": "length", "capacity": "length"}


class AnswerWriter:
    """Writes answers into conversations. For the event loop's thread; what takes time runs beside it."""

    def __init__(self, service: Service, records: OwnedRecords) -> None:
        self.service = service
        self.epoch = new_id("", 12)  # versions of an earlier run of the server, or of another one, mean nothing
        self.store = ConversationStore(records, service.model.fingerprint)
        self.branches = BranchPrompts(service, self.store)
        self._closing = asyncio.Event()

    async def _begin(
        self,
        live: Live,
        answer: MessageNode,
        request: Request,
        media: Spans,
        changed: list[MessageNode],
        title: str | None = None,
        pictures: Mapping[str, bytes] | None = None,
    ) -> None:
        """Store the messages that are new, then begin to write the answer. A refusal has changed nothing."""
        conversation = live.conversation
        for node in changed:
            known = conversation.nodes.get(node.id)
            node.turn, node.writer = 0 if known is None else known.turn + 1, self.epoch
        updated = time()
        live.running[answer.id] = request
        try:
            begun = replace(conversation, updated=updated)
            await self._save(live, begun, *changed, title=title, pictures=pictures)
        except BaseException:
            request.cancel()
            del live.running[answer.id]
            raise
        conversation.title, conversation.updated = title or conversation.title, updated
        conversation.nodes = {**conversation.nodes, **{node.id: node for node in changed}}  # threads may go through it
        live.touch(*changed)
        task = asyncio.get_running_loop().create_task(self._write(live, answer, request, media))
        live.tasks.add(task)
        task.add_done_callback(live.tasks.discard)

    async def _save(
        self,
        live: Live,
        conversation: Conversation,
        *nodes: MessageNode,
        title: str | None = None,
        settings: dict[str, Any] | None = None,
        pictures: Mapping[str, bytes] | None = None,
    ) -> None:
        """Store these messages of a conversation, as they are now, with new pictures, its title and its settings."""
        copies = [node.copy() for node in nodes]
        async with live.saving:
            if live.deleted:
                raise ApiError("the conversation was deleted", 404)
            put = partial(self.store.put, conversation, *copies, title=title, settings=settings, pictures=pictures)
            try:
                generation = await asyncio.to_thread(put)
            except ConversationMoved:
                raise ApiError(
                    "another server of this store changed the conversation meanwhile: try again", 409
                ) from None
            if generation == live.conversation.generation + 1:  # else others' changes are adopted with the next look
                live.conversation.generation = generation

    async def _write(self, live: Live, answer: MessageNode, request: Request, media: Spans) -> None:
        """Take an answer's pieces into the conversation, to its end."""
        status, wrong, ended = "stopped", "", asyncio.Event()
        saving = asyncio.create_task(self._save_progress(live, answer, ended))
        try:
            status = await self._take(live, answer, request)
        except Drained:
            pass  # it can be gone on with once the server is back
        except Exception as error:
            log.error("an answer of a conversation failed", exc_info=error)
            status, wrong = "failed", as_api_error(error).message
        finally:
            request.cancel()
            ended.set()
            await saving
            # Rendered and stored before its end is told: who sees that it ended sees all of it.
            blocks = await asyncio.to_thread(render_blocks, answer.text)
            saved = live.deleted or await self._saved(live, replace(answer, status=status, error=wrong))
            answer.status, answer.error = status, wrong
            live.running.pop(answer.id, None)
            if live.conversation.nodes.get(answer.id) is answer and not live.deleted:
                live.grew(answer, blocks)
                await self.hold(live.conversation, answer, media)
                if not saved:
                    await self._save_later(live, answer)

    async def _save_progress(self, live: Live, answer: MessageNode, ended: asyncio.Event) -> None:
        """Store what there is of an answer from time to time: other servers see it, and know that it is written."""
        wait = SAVED_EVERY
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), wait)
            began = monotonic()
            async with live.saving:
                if ended.is_set() or live.deleted:
                    return
                try:
                    await asyncio.to_thread(self.store.put_messages, live.conversation.id, answer.copy())
                except STORE_ERRORS as error:  # its end is tried again
                    log.info("an answer of conversation %s is not saved for now: %s", live.conversation.id, error)
            wait = max(SAVED_EVERY, min(STILL_SECONDS, SHARE * (monotonic() - began)))

    async def _saved(self, live: Live, answer: MessageNode) -> bool:
        """Save an answer. False if it cannot be, which those who watch are told."""
        try:
            await self._save(live, live.conversation, answer)
        except ApiError:  # it was deleted meanwhile, or another server goes on with it
            return True
        except STORE_ERRORS as error:
            if answer.id not in live.unsaved:
                log.warning(
                    "an answer of conversation %s is not saved, and is tried again: %s", live.conversation.id, error
                )
            live.unsaved.add(answer.id)
            return False
        live.unsaved.discard(answer.id)
        return True

    async def _save_later(self, live: Live, answer: MessageNode) -> None:
        """Save an answer once that can be."""
        wait, last = FIRST_RETRY, False
        while not last:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), wait)
            last = self._closing.is_set()
            if await self._saved(live, answer):
                break
            wait = min(2 * wait, LAST_RETRY)
        live.touch(answer)

    async def _take(self, live: Live, answer: MessageNode, request: Request) -> str:
        """All pieces of an answer. Returns the status that it ended with."""
        reader, growing = self._reader(live, answer), GrowingMarkdown()
        own = live.conversation.own_tokens(answer)
        reader.push(Piece("", tokens=own))  # those that an answer which goes on has already
        answer.text, answer.reasoning = reader.text, reader.reasoning
        growing.push(answer.text, end=True)
        live.grew(answer, growing.blocks)
        later: asyncio.TimerHandle | None = None

        def show(text: str = "") -> None:
            nonlocal later
            if later is not None:
                later.cancel()
            if (first := growing.push(text)) is not None:
                live.grew(answer, growing.blocks, first)
            elif (wait := growing.wait) is not None:  # shown then, also where no piece comes meanwhile
                later = asyncio.get_running_loop().call_later(wait, show)

        try:
            async for piece in request:
                before = len(answer.text)
                reader.push(piece)
                answer.text, answer.reasoning = reader.text, reader.reasoning
                answer.added += piece.tokens
                answer.logprobs += [(entry.logprob, list(entry.top)) for entry in piece.logprobs or []]
                show(answer.text[before:])
        finally:
            if later is not None:
                later.cancel()
        completion = await request.wait()
        by = completion.stopped_by[0]
        # The engine counts the tokens that belong to the answer; one that ended it is kept apart.
        answer.end = by if completion.finished[0] == "eos" and isinstance(by, int) else None
        own = [*own, *completion.tokens[0]]
        answer.added = [*answer.added[: answer.start - answer.base], *own]
        del answer.logprobs[len(own) :]
        usage = completion.usage
        answer.usage = {"prompt": usage.prompt, "generated": usage.generated, **usage_details(usage)}
        return FINISHED.get(completion.finished[0], "stopped")

    def _reader(self, live: Live, answer: MessageNode) -> Answer:
        """A parser that makes text and reasoning of an answer's tokens."""
        tokens = live.conversation.tokens(answer)[: answer.start]
        prompt = Prompt(PicturePrompt(tokens), self.service.tokenizer.decode(tokens[-64:], False), b"")
        return self.service.maker(prompt, ToolUse()).answers(1)[0]

    async def hold(self, conversation: Conversation, answer: MessageNode, media: Spans = ()) -> None:
        """Let a session be at the end of a branch: what going on from there needs then stays in memory.

        `media`: the pictures among its tokens. Such a session has no messages: they would hold each picture once more.
        """
        above, record = conversation.answer_before(answer), self.branches.record(conversation, answer)
        record.media = list(media)
        if conversation.pictures(answer):
            record.messages, record.turns = [], [Moment(turn.tokens, 0) for turn in record.turns]
        before = [caller().stored(session_name(conversation.id, one.id)) for one in (above, answer) if one is not None]
        salt = caller().salt()

        def move() -> None:
            for name in before:
                if (session := self.service.engine.find_session(name, salt)) is not None:
                    session.close()
            self.service.engine.new_session(before[-1], record, salt)

        try:
            await asyncio.to_thread(move)
        except Exception as error:  # the engine is closing, or the session was made meanwhile; nothing is lost
            log.info("the session of an answer was not made: %s", error)


def session_name(conversation: str, answer: str) -> str:
    """The session that is at the end of an answer, for those who look at `/v1/sessions`."""
    return f"{conversation}.{answer}"
