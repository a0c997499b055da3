"""`/v1/responses`: OpenAI's stateful protocol. `previous_response_id` goes on from the very tokens of that response."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import time
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.answers import AnsweredCall, Passage, usage_details
from lmstate.serve.answer.handlers import idempotency_key, json_response, log
from lmstate.serve.answer.messages import Chat, Message
from lmstate.serve.answer.sampling import sampling_params, stops
from lmstate.serve.answer.service import ChatTask, Service, ToolUse
from lmstate.serve.openai import fields
from lmstate.serve.openai.chat import event_stream
from lmstate.serve.openai.responses import items
from lmstate.serve.openai.responses.background import BackgroundResponse
from lmstate.serve.openai.responses.conversation_store import StoredConversation
from lmstate.serve.openai.responses.conversations import conversation_named
from lmstate.serve.openai.responses.kept import KeptResponses, kept_responses
from lmstate.serve.openai.responses.output import Output
from lmstate.serve.openai.responses.store import StoredResponse
from lmstate.serve.openai.responses.stored import followed
from lmstate.serve.openai.tools import KINDS, NAMESPACE, read_tool_use
from lmstate.serve.tools import Text
from lmstate.serve.tools.base import tool_named
from lmstate.serve.wire.body import wrong
from lmstate.serve.wire.errors import ApiError, as_api_error
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.owned_records import STORE_ERRORS
from lmstate.serve.wire.schema.responses import ResponseBody, TextOptions
from lmstate.serve.wire.sse import EventStream, comment
from lmstate.text.grammars.constraint import Constraint
from lmstate.text.replay import Sampled

if TYPE_CHECKING:
    from lmstate.generation import SamplingParams

ENDINGS = {"completed": "completed", "failed": "failed"}  # events that end a stream; the protocol has none of a cancel


@dataclass(frozen=True)
class Asked:
    """A responses request, read."""

    body: ResponseBody
    chat: Chat
    use: ToolUse
    constraint: Constraint | None
    input: list[dict[str, Any]]
    previous: StoredResponse | None
    answered: int  # messages of `chat` that `previous` answered
    conversation: StoredConversation | None = None

    @property
    def background(self) -> bool:
        return bool(self.body.background)

    @property
    def store(self) -> bool:
        return self.body.store is not False

    @property
    def key(self) -> bytes:
        return (self.body.instructions or "").encode() + b"\0" + self.chat.key()


@dataclass(frozen=True)
class ResponseAnswer:
    """An answer in the form of the Responses API, and its record in the store."""

    service: Service
    kept: KeptResponses
    task: ChatTask
    asked: Asked
    id: str
    params: SamplingParams
    output: Output = field(default_factory=Output)

    def object(self, status: str) -> dict[str, Any]:
        body, params = self.asked.body, self.params
        reason = None
        if status == "incomplete":
            reason = {"reason": "max_output_tokens"}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.task.created,
            "completed_at": int(time()) if status == "completed" else None,
            "status": status,
            "background": self.asked.background,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model or self.service.settings.model_name,
            "output": self.output.items,
            "parallel_tool_calls": self.asked.use.parallel,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": self.asked.store,
            "conversation": None if self.asked.conversation is None else {"id": self.asked.conversation.id},
            "temperature": params.temperature,
            "text": shown_text(body.text),
            "tool_choice": to_builtins(body.tool_choice) or "auto",
            "tools": [shown_tool(tool) for tool in body.tools or [] if tool.get("type") in (*KINDS, NAMESPACE)],
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "max_tool_calls": None,
            "service_tier": "default",
            "safety_identifier": None,
            "prompt_cache_key": None,
            "truncation": body.truncation or "disabled",
            "usage": None if self.task.completion is None else usage_of(self.task),
            "metadata": body.metadata or {},
        }

    def shown(self) -> dict[str, Any]:
        """The response as it stands while it is made."""
        begun = self.task.request.computed > 0
        return self.object("in_progress" if begun else "queued")

    async def events(self) -> AsyncIterator[bytes]:
        """All events up to the end; `output` holds the items then."""
        output = self.output
        yield output.event("response.created", response=self.object("in_progress"))
        yield output.event("response.in_progress", response=self.object("in_progress"))
        try:
            async for _, _, found in self.task.events():
                for one in found:
                    told = fields.token_logprobs(self.service, one.logprobs) if isinstance(one, Text) else []
                    for out in output.take(one, told):
                        yield out
            status = self.status()
            if not output.items:
                for out in output.begin_message():
                    yield out
            for out in output.close("completed" if status == "completed" else "incomplete"):
                yield out
            response = await self.keep(status)
            yield output.event(f"response.{ENDINGS.get(status, 'incomplete')}", response=response)
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            failure = as_api_error(error)
            failed = {**self.object("failed"), "error": {"code": "server_error", "message": failure.message}}
            if self.asked.background:
                try:
                    await self.store(failed, begun=True)
                except STORE_ERRORS as refused:
                    log.error("the response %s could not be stored: %s", self.id, refused)
            yield output.event("response.failed", response=failed)

    def status(self) -> str:
        """Of a response that ended."""
        finished = self.task.answers[0].finished
        if finished == "cancelled" and self.asked.background:
            return "cancelled"
        return "completed" if finished in ("eos", "stop") else "incomplete"

    async def keep(self, status: str) -> dict[str, Any]:
        """Remember what was sampled, and store the response unless the client said not to. Returns it as it is told."""
        message = items.answer_message(self.task.answers[0])
        sampled = self.service.remember(self.task, self.task.answers[0], message)
        response = self.object(status)
        if self.asked.store:
            instructed = self.asked.body.instructions is not None
            try:
                messages = (*self.asked.chat.messages[1 if instructed else 0 :], message)
                await self.store(response, messages, sampled, begun=self.asked.background)
            except STORE_ERRORS as error:  # a full disk, say: what was computed is answered, and said to be not stored
                log.error("the response %s could not be stored: %s", self.id, error)
                response["store"] = False
        # The conversation comes second: a kill in between is made good when the request is repeated with its key.
        if (conversation := self.asked.conversation) is not None:
            try:
                await asyncio.to_thread(
                    self.kept.conversations.append,
                    conversation.id,
                    [*self.asked.input, *response["output"]],
                    response=self.id if response["store"] else None,
                    after=len(conversation.items),
                )
            except BaseException:
                if response["store"] and not self.asked.background:  # one in the background is stored as failed
                    with suppress(*STORE_ERRORS):
                        await asyncio.to_thread(self.kept.responses.delete, self.id)
                raise
        return response

    async def store_progress(self) -> None:
        """Store the response as it stands, so that other processes know that it is made."""
        try:
            await self.store(self.shown(), begun=True)
        except STORE_ERRORS as error:
            log.warning("the response %s could not be stored for now: %s", self.id, error)

    async def store(
        self,
        response: dict[str, Any],
        messages: tuple[Message, ...] = (),
        sampled: Sampled | None = None,
        *,
        begun: bool = False,
    ) -> None:
        """Store the response, which had `begun` to be stored before. Nothing goes on from one without messages."""
        tokens, end = ((), None) if sampled is None else (sampled.tokens, sampled.end)
        fingerprint = self.service.model.fingerprint
        stored = StoredResponse(self.id, fingerprint, response, self.asked.input, messages, tokens, end, self.asked.key)
        await asyncio.to_thread(partial(self.kept.responses.put, stored, begun=begun))


def usage_of(task: ChatTask) -> dict[str, Any]:
    """The usage of a task that ended."""
    assert task.completion is not None
    usage = task.completion.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.reused, "cache_write_tokens": usage.prompt - usage.reused},
        "output_tokens": usage.generated,
        "output_tokens_details": {"reasoning_tokens": task.answers[0].reasoning_tokens},
        "total_tokens": usage.prompt + usage.generated,
        "lmstate": usage_details(usage),
    }


def shown_text(given: TextOptions | None) -> dict[str, Any]:
    """`text` of a response: the form that its text has."""
    format = None if given is None else given.format
    shown = {"type": "text"} if format is None else {k: v for k, v in to_builtins(format).items() if v is not None}
    if shown["type"] == "json_schema":
        shown = {"description": None, "strict": False, **shown}
    return {"format": shown}


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with all the fields that the protocol's functions have."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}


async def create_response(service: Service, request: Request, body: ResponseBody) -> ASGIApp:
    kept, id = kept_responses(request), new_id("resp_")
    if (key := idempotency_key(request, body)) is not None and body.store is not False:
        id = f"resp_{key[:48]}"  # the request that is repeated finds its response by it
        if (told := await told_again(service, kept, body, id)) is not None:
            return told
    asked = await prepare(service, kept, body)
    include = [body.include] if isinstance(body.include, str) else body.include or []
    wants_logprobs = bool(body.top_logprobs) or "message.output_text.logprobs" in include
    params = replace(
        sampling_params(body, service.vocab_size, service.model.defaults),
        stop=stops(body.stop),
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
    )
    task = await service.chat(
        request.receive,
        asked.chat,
        params,
        use=asked.use,
        max_new_tokens=body.max_output_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        constraint=asked.constraint,
        tokens=await asyncio.to_thread(exact_tokens, service, asked),
    )
    answer = ResponseAnswer(service, kept, task, asked, id, params, Output(asked.use.tools))
    if asked.background:
        try:
            await answer.store(answer.object("queued"))  # so that one which a kill ends is known to have been
        except BaseException:
            task.request.cancel()
            raise
        live = BackgroundResponse(answer.id, answer.shown, task.request.cancel)
        kept.background.start(live, answer.events(), answer.store_progress)
        return followed(service, live, task.progress) if body.stream else json_response(answer.shown())
    if body.stream:
        return event_stream(service, task, answer.events())
    await task.finished()
    return json_response(await whole(answer))


async def told_again(service: Service, kept: KeptResponses, body: ResponseBody, id: str) -> ASGIApp | None:
    """A response that was asked for before; None if it was not, or a kill ended it."""
    if (live := kept.background.running(id)) is not None:
        return followed(service, live) if body.stream else json_response(live.shown())
    stored = await asyncio.to_thread(kept.responses.get, id)
    if stored is None or not stored.ended:
        return None
    if (conversation := stored.body.get("conversation")) is not None:  # a kill may have come before it had them
        await asyncio.to_thread(
            partial(kept.conversations.append, conversation["id"], stored.items, response=stored.id)
        )
    if not body.stream:
        return json_response(stored.body)

    async def events() -> AsyncIterator[bytes]:
        output, status = Output(), stored.body["status"]
        yield output.event("response.created", response={**stored.body, "status": "in_progress", "output": []})
        yield output.event(f"response.{ENDINGS.get(status, 'incomplete')}", response=stored.body)

    settings = service.settings
    return EventStream(events(), lambda: comment("ping"), settings.ping_interval, settings.write_timeout, {})


async def whole(answer: ResponseAnswer) -> dict[str, Any]:
    """The response of a task that ended."""
    made, output = answer.task.answers[0], answer.output
    status = answer.status()
    parts = made.parts or [Passage(Text, "")]
    for part in parts:
        ended = "completed" if status == "completed" or part is not parts[-1] else "incomplete"
        if isinstance(part, AnsweredCall):
            tool = tool_named(output.tools, part.name)
            output.items.append(items.call_item(part.id, part.name, part.arguments, ended, tool))
        elif part.kind is Text:
            content = [items.text_part(part.text, fields.token_logprobs(answer.service, part.logprobs))]
            output.items.append(items.message_item(new_id("msg_"), content, ended))
        else:
            output.items.append(items.reasoning_item(new_id("rs_"), part.text, ended))
    return await answer.keep(status)


async def prepare(service: Service, kept: KeptResponses, body: ResponseBody) -> Asked:
    """A body as read: earlier items, new items, and the parameters of the answer. Raises `ApiError`."""
    if body.background and body.store is False:
        raise ApiError("a response in the background is asked for by its id: it needs store", param="store")
    conversation = await asyncio.to_thread(conversation_of, kept, body)
    previous = None
    if (id := body.previous_response_id) is not None:
        previous = await asyncio.to_thread(kept.responses.get, id)
        if previous is None or not previous.messages:
            elsewhere = previous is not None and kept.made_elsewhere(previous)
            running = elsewhere or kept.background.running(id) is not None
            message = "has not ended: wait for it" if running else "is not stored here (any more), or has no answer"
            raise ApiError(
                f"the response {id!r} {message}",
                409 if running else 404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
    if conversation is not None and conversation.last is not None:
        last = await asyncio.to_thread(kept.responses.get, conversation.last)
        previous = last if last is not None and last.messages else None
    goes_on = id is not None or conversation is not None
    new, listed = await asyncio.to_thread(items.read_input, body.input, goes_on, kept.find_item)
    use = read_tool_use(body, wrapped=False)
    effort = None if body.reasoning is None else body.reasoning.effort
    thinking, variables = fields.thinking_of(body)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        thinking = False if effort in fields.UNTHINKING and thinking is None else thinking
    format = body.response_format if body.text is None else body.text.format
    constraint = fields.read_constraint(body, format, "text.format")
    system = [Message("system", body.instructions)] if body.instructions is not None else []
    before = [] if previous is None else list(previous.messages)
    if conversation is not None and previous is None:
        before = items.read_items(conversation.items, "items", kept.find_item)[0]
    if not (*before, *new):
        raise wrong("input", "a string or an array of items", body.input)
    control = bool(body.control_tokens)
    chat = Chat((*system, *before, *new), use.tools, thinking, variables, control_tokens=control)
    asked = Asked(body, chat, use, constraint, listed, previous, len(system) + len(before), conversation)
    return await asyncio.to_thread(truncated, service, asked) if body.truncation == "auto" else asked


def truncated(service: Service, asked: Asked) -> Asked:
    """Without the oldest turns, as few as make room for the answer; the system's messages stay."""
    if service.context is None:
        return asked
    messages, quarter = asked.chat.messages, service.context // 4
    most = service.context - min(asked.body.max_output_tokens or quarter, quarter)
    lead = next((at for at, message in enumerate(messages) if message.role != "system"), 0)

    def from_turn(start: int) -> Chat:
        return replace(asked.chat, messages=(*messages[:lead], *messages[start:]))

    def fits(start: int) -> bool:
        chat = from_turn(start)
        try:
            service.refuse_long_chat(chat)
        except ApiError:
            return False
        return len(service.renderer.prompt(chat).tokens) <= most

    starts = [at for at in range(lead, len(messages)) if at == lead or messages[at].role == "user"]
    first = bisect_left(starts, True, key=fits)
    if first == 0 or not starts:
        return asked
    return replace(asked, chat=from_turn(starts[min(first, len(starts) - 1)]), previous=None)


def conversation_of(kept: KeptResponses, body: ResponseBody) -> StoredConversation | None:
    """The `conversation` that a body names, by its id or in an object."""
    if (given := body.conversation) is None:
        return None
    if body.previous_response_id is not None:
        raise ApiError(
            "conversation and previous_response_id both say what came before: give one", param="conversation"
        )
    return conversation_named(kept, given if isinstance(given, str) else given.id)


def exact_tokens(service: Service, asked: Asked) -> list[int] | None:
    """The prompt as the tokens of the previous response and what is new; None where its beginning changed."""
    previous = asked.previous
    if (
        previous is None
        or not previous.tokens
        or previous.key != asked.key
        or previous.model != service.model.fingerprint
    ):
        return None
    service.refuse_long_chat(asked.chat)
    return service.renderer.after(asked.chat, asked.answered, list(previous.tokens), previous.end)


async def count_input(service: Service, request: Request, body: ResponseBody) -> ASGIApp:
    asked = await prepare(service, kept_responses(request), body)
    exact = await asyncio.to_thread(exact_tokens, service, asked)
    tokens = exact or (await asyncio.to_thread(service.renderer.prompt, asked.chat)).tokens
    return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})
