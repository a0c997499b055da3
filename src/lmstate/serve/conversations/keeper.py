"""The server's conversations, and the answers in them: they are written whether or not a page looks on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from lmstate.engine.results import EngineError
from lmstate.serve.answer.handlers import log
from lmstate.serve.answer.sampling import sampling_params
from lmstate.serve.answer.service import Service
from lmstate.serve.conversations.live import Live
from lmstate.serve.conversations.tree import Conversation, MessageNode
from lmstate.serve.conversations.writing import AnswerWriter, session_name
from lmstate.serve.wire.body import read
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.owned_records import STORE_ERRORS, OwnedRecords
from lmstate.serve.wire.schema.sessions import PageSettings
from lmstate.serve.wire.tenants import caller
from lmstate.vision.reader import PicturePrompt

if TYPE_CHECKING:
    from lmstate.engine import Request
    from lmstate.generation import SamplingParams

ALTERNATIVES = 8  # of each token, with their probabilities
LOOK_SECONDS = 2.0  # between two looks for what other servers have changed
MOST_OPEN = 64
OTHER = 0.8  # temperature of another answer to a message, where neither settings nor the model's makers have one
UNTITLED = "New conversation"


class Keeper(AnswerWriter):
    """Opens, answers and forgets conversations. For the event loop's thread; what takes time runs beside it."""

    def __init__(self, service: Service, records: OwnedRecords) -> None:
        super().__init__(service, records)
        self.shared = records.shared
        self._open: dict[str, Live] = {}  # by the stored forms of ids

    # ---- conversations: what cannot be stored is refused, and changes nothing

    async def create(
        self,
        title: str = "",
        settings: dict[str, Any] | None = None,
        nodes: Sequence[MessageNode] = (),
        pictures: Mapping[str, bytes] | None = None,
    ) -> Live:
        conversation = Conversation(new_id("c", 12), title or UNTITLED, time(), settings or {})
        conversation.nodes = {node.id: replace(node, writer=self.epoch) for node in nodes}
        live = Live(conversation)
        await self._save(live, conversation, *conversation.nodes.values(), pictures=pictures)
        self._open[caller().stored(conversation.id)] = live
        return live

    async def open(self, id: str) -> Live:
        """The open conversation of this id, as its record is now. Raises `ApiError` if there is none."""
        name = caller().stored(id)
        if (live := self._open.get(name)) is not None:
            await self.refresh(live)
        elif (conversation := await asyncio.to_thread(self.store.get, id)) is not None:
            for old in [old for old, live in self._open.items() if live.idle][: max(0, len(self._open) - MOST_OPEN)]:
                del self._open[old]
            live = self._open.setdefault(name, Live(conversation))
        if live is None or live.deleted:
            raise ApiError(f"there is no conversation {id[:100]!r}; it may have been deleted", 404)
        return live

    async def refresh(self, live: Live) -> None:
        """Adopt a newer record, and what other servers have written of their answers."""
        if not self.shared:
            return
        async with live.saving:
            conversation = live.conversation
            newer = await asyncio.to_thread(self.store.generation, conversation.id) != conversation.generation
            if not newer and not live.written_elsewhere:
                return
            there = await asyncio.to_thread(self.store.get, conversation.id, conversation)
            if there is None:
                self._forget(live)
                await self._close_left(live)
                return
            await live.adopt(there, self.epoch)
            for id in live.running:
                if (node := there.nodes.get(id)) is not None and node.writer != self.epoch:
                    self.stop(live, node)

    async def look(self, live: Live) -> None:
        """`refresh` from time to time, for those who watch."""
        if monotonic() > live.next_look:
            live.next_look = monotonic() + LOOK_SECONDS
            try:
                await self.refresh(live)
            except STORE_ERRORS as error:
                log.info("the conversation %s is as it was known: %s", live.conversation.id, error)

    async def delete(self, live: Live, only_empty: bool = False) -> None:
        """Raises `ApiError` for a conversation with messages if only an empty one is to go."""
        id = live.conversation.id

        def refuse_messages() -> None:
            if only_empty and (live.conversation.nodes or live.running):
                raise ApiError("the conversation has messages", 409)

        refuse_messages()
        await asyncio.to_thread(self._close_sessions, id)
        async with live.saving:
            refuse_messages()  # one may have come meanwhile
            await asyncio.to_thread(self.store.delete, id)
            self._forget(live)
        await asyncio.gather(*live.tasks, return_exceptions=True)
        await self._close_left(live)  # those of answers that ended meanwhile

    async def _close_left(self, live: Live) -> None:
        """Close the sessions of a conversation that was deleted."""
        try:
            await asyncio.to_thread(self._close_sessions, live.conversation.id)
        except EngineError as error:
            log.warning("a session of the deleted conversation %s is left: %s", live.conversation.id, error)

    def _forget(self, live: Live) -> None:
        """End what is done for a conversation that was deleted."""
        live.deleted = True
        self._open.pop(caller().stored(live.conversation.id), None)
        for request in live.running.values():
            request.cancel()
        live.touch()

    async def change(self, live: Live, title: str | None, settings: dict[str, Any] | None) -> None:
        conversation = live.conversation
        title = conversation.title if title is None else title
        if settings is None:
            settings = conversation.settings
        else:
            self.params(settings)  # refuses what is out of range
        await self._save(live, conversation, title=title, settings=settings)
        conversation.title, conversation.settings = title, settings
        live.touch()

    def params(self, settings: dict[str, Any]) -> SamplingParams:
        given = read(settings, PageSettings, "settings")
        return sampling_params(given, self.service.vocab_size, self.service.model.defaults)

    # ---- answers

    async def say(
        self,
        live: Live,
        parent: MessageNode | None,
        text: str,
        names: list[str],
        new: Mapping[str, bytes],
    ) -> tuple[MessageNode, MessageNode]:
        """A message of the user below `parent`, and the answer to it, which begins to be written.

        `names`: its pictures, of which `new` has those that the conversation does not have yet.
        """
        if parent is not None and parent.role != "assistant":
            raise ApiError("a message follows an answer: answer the message before it first", param="parent")
        if parent is not None and parent.status == "running":
            raise ApiError("the answer above is still being written: wait for it, or stop it", 409, param="parent")
        above, sounds = None if parent is None else parent.id, live.conversation.sounds(names, new)
        user = MessageNode(new_id("m", 10), above, "user", text, names, sounds, created=time())
        answer = await self._answer(live, user, new)
        return user, answer

    async def answer(self, live: Live, user: MessageNode) -> MessageNode:
        """Another answer to a message."""
        if user.role != "user":
            raise ApiError("only a message of the user can be answered", param="parent")
        return await self._answer(live, user)

    async def _answer(self, live: Live, user: MessageNode, pictures: Mapping[str, bytes] | None = None) -> MessageNode:
        """`pictures`: the new ones of a message that is new itself."""
        conversation = live.conversation
        system = conversation.settings.get("system") or ""
        plan = await asyncio.to_thread(self.branches.plan, conversation, user, system, pictures or {})
        base, prompt = plan.base, plan.prompt
        request = self._submit(live, prompt, other=bool(conversation.children(user.id)))
        answer = MessageNode(new_id("m", 10), user.id, "assistant", status="running", created=time(), system=system)
        answer.base, answer.added, answer.start = base, prompt.tokens[base:], len(prompt.tokens)
        title = conversation.title
        if title == UNTITLED:
            of_files = "A sound" if user.sounds else "A picture" if user.pictures else UNTITLED
            title = " ".join(user.text.split())[:60] or of_files
        changed = [answer] if pictures is None else [user, answer]
        await self._begin(live, answer, request, prompt.media, changed, title, pictures)
        return answer

    async def go_on(self, live: Live, answer: MessageNode) -> MessageNode:
        """Write on an answer that was stopped or cut off; one that messages follow, as another answer."""
        self._refuse_unended(live, answer)
        if answer.end is not None:
            raise ApiError("the answer ended by itself: there is nothing to continue", 409)
        prompt = await self._pictured_end(live, answer)
        conversation = live.conversation
        request = self._submit(live, prompt)
        begun = replace(answer, status="running", error="", added=[*answer.added], logprobs=[*answer.logprobs])
        if conversation.children(answer.id):  # what was said after it was said after what it is now
            begun.id, begun.created = new_id("m", 10), time()
        await self._begin(live, begun, request, prompt.media, [begun])
        return begun

    async def fork(self, live: Live, answer: MessageNode, at: int, token: int) -> MessageNode:
        """An answer beside this one: the same up to its own token number `at`, then `token`."""
        self._refuse_unended(live, answer)
        prompt = await self._pictured_end(live, answer)
        whole = prompt.tokens
        if not 0 <= at < len(answer.logprobs):
            raise ApiError(f"at must be a token of the answer, 0 to {len(answer.logprobs) - 1}", param="at")
        if token in self.service.model.eos_ids:
            raise ApiError("that token ends the answer: nothing would follow it", param="token")
        kept = len(whole) - answer.start - at
        top = answer.logprobs[at][1]
        tokens = [*whole[: len(whole) - kept], token]
        request = self._submit(live, replace(prompt, tokens=tokens))
        other = replace(answer, id=new_id("m", 10), status="running", error="", created=time(), end=None, usage={})
        other.added = [*answer.added[: len(answer.added) - kept], token]
        other.logprobs = [*answer.logprobs[:at], (dict(top).get(token, -math.inf), list(top))]
        other.text = other.reasoning = ""
        await self._begin(live, other, request, prompt.media, [other])
        return other

    def stop(self, live: Live, answer: MessageNode) -> None:
        if (request := live.running.get(answer.id)) is not None:
            request.cancel()
        elif answer.status == "running":
            raise ApiError("the answer is written by another server of this store: stop it there", 409)

    def _refuse_unended(self, live: Live, answer: MessageNode) -> None:
        if answer.role != "assistant" or answer.status == "running" or answer.id in live.running:
            raise ApiError("only an answer that is no longer written can be gone on with", 409)

    async def _pictured_end(self, live: Live, answer: MessageNode) -> PicturePrompt:
        """All tokens up to the end of an answer that may be gone on with, also when its pictures have been read."""
        prompt = await asyncio.to_thread(self.branches.prompt, live.conversation, answer)
        self._refuse_unended(live, answer)
        if live.conversation.nodes.get(answer.id) is not answer:
            raise ApiError("another server of this store changed the answer meanwhile: try again", 409)
        return prompt

    # ---- the parts of it

    def _submit(self, live: Live, prompt: PicturePrompt, *, other: bool = False) -> Request:
        if live.deleted:
            raise ApiError("the conversation was deleted", 404)
        settings = live.conversation.settings
        params = replace(self.params(settings), logprobs=ALTERNATIVES)
        if other and params.greedy and "temperature" not in settings:
            params = replace(params, temperature=OTHER)  # the likeliest answer is there already
        return self.service.submit(
            prompt, params, max_new_tokens=settings.get("max_tokens"), priority=settings.get("priority") or 0
        )

    def _close_sessions(self, conversation: str) -> None:
        for name in self.service.engine.sessions():
            if name.startswith(caller().stored(session_name(conversation, ""))):
                found = self.service.engine.find_session(name, caller().salt())
                if found is not None:
                    found.close()

    @property
    def busy(self) -> bool:
        """Whether an answer is being written."""
        return any(live.tasks for live in self._open.values())

    async def close(self) -> None:
        """End the answers that are written as they are, and keep them."""
        self._closing.set()
        tasks = [task for live in self._open.values() for task in live.tasks]
        for live in self._open.values():
            for request in live.running.values():
                request.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)
