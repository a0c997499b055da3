"""`/v1/responses`: OpenAI's stateful protocol. `previous_response_id` goes on from the very tokens of that response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve import openai_fields as fields
from lmstate.serve import response_items as items
from lmstate.serve.answers import new_id, usage_details
from lmstate.serve.errors import ApiError, as_api_error
from lmstate.serve.fields import Fields
from lmstate.serve.http import json_response, log, read_body
from lmstate.serve.messages import Chat, Message
from lmstate.serve.openai_chat import MOST_TOP, event_stream
from lmstate.serve.response_store import Stored
from lmstate.serve.sampling import sampling_options, stops
from lmstate.serve.service import ChatTask, Constraint, Service, ToolUse
from lmstate.serve.sse import event
from lmstate.serve.tools import CallArguments, CallStart, Event, Reasoning, Text


@dataclass(frozen=True)
class Asked:
    """A responses request, read."""

    body: Fields
    chat: Chat
    use: ToolUse
    constraint: Constraint | None
    input: list[Any]
    previous: Stored | None
    answered: int  # messages of `chat` that `previous` answered

    @property
    def key(self) -> bytes:
        return (self.body.text("instructions") or "").encode() + b"\0" + self.chat.key()


@dataclass
class Output:
    """The output items of a response as they grow, and the events of each step."""

    items: list[dict[str, Any]] = field(default_factory=list)
    sequence: int = 0
    open: str = ""
    text: str = ""

    def event(self, kind: str, **values: Any) -> bytes:
        number, self.sequence = self.sequence, self.sequence + 1
        return event(kind, {"type": kind, "sequence_number": number, **values})

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _part(self) -> dict[str, Any]:
        return {**self._where, "content_index": 0}

    def take(self, found: Event, logprobs: list[Any]) -> list[bytes]:
        """The protocol's events for one of ours."""
        if isinstance(found, Text) and found.text:
            events = [] if self.open == "message" else self._begin_message()
            self.text += found.text
            return [
                *events,
                self.event("response.output_text.delta", **self._part, delta=found.text, logprobs=logprobs),
            ]
        if isinstance(found, Reasoning) and found.text:
            events = [] if self.open == "reasoning" else self._begin_reasoning()
            self.text += found.text
            return [*events, self.event("response.reasoning_text.delta", **self._part, delta=found.text)]
        if isinstance(found, CallStart):
            item = items.call_item(new_id("fc_"), found.id or new_id("call_"), found.name, "", "in_progress")
            return self._begin("call", item)
        if isinstance(found, CallArguments) and found.text:
            self.text += found.text
            return [self.event("response.function_call_arguments.delta", **self._where, delta=found.text)]
        return []

    def _begin(self, kind: str, item: dict[str, Any]) -> list[bytes]:
        events = self.close("completed", [])
        self.open, self.text = kind, ""
        self.items.append(item)
        added = self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)
        return [*events, added]

    def _begin_message(self) -> list[bytes]:
        events = self._begin("message", items.message_item(new_id("msg_"), [], "in_progress"))
        return [*events, self.event("response.content_part.added", **self._part, part=items.text_part(""))]

    def _begin_reasoning(self) -> list[bytes]:
        events = self._begin("reasoning", items.reasoning_item(new_id("rs_"), "", "in_progress"))
        part = {"type": "reasoning_text", "text": ""}
        return [*events, self.event("response.content_part.added", **self._part, part=part)]

    def close(self, status: str, logprobs: list[Any]) -> list[bytes]:
        """End the open item."""
        kind, self.open = self.open, ""
        if not kind:
            return []
        item = self.items[-1]
        if kind == "message":
            part = items.text_part(self.text, logprobs)
            events = [
                self.event("response.output_text.done", **self._part, text=self.text, logprobs=logprobs),
                self.event("response.content_part.done", **self._part, part=part),
            ]
            item["content"] = [part]
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": self.text}
            events = [
                self.event("response.reasoning_text.done", **self._part, text=self.text),
                self.event("response.content_part.done", **self._part, part=part),
            ]
            item["content"] = [part]
        else:
            item["arguments"] = self.text
            done = {"name": item["name"], "arguments": self.text}
            events = [self.event("response.function_call_arguments.done", **self._where, **done)]
        item["status"] = status
        return [*events, self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)]


@dataclass(frozen=True)
class ResponseAnswer:
    """How a response is worded, and kept."""

    service: Service
    task: ChatTask
    asked: Asked
    wants_logprobs: bool
    id: str = field(default_factory=lambda: new_id("resp_"))
    output: Output = field(default_factory=Output)

    def object(self, status: str) -> dict[str, Any]:
        body = self.asked.body
        options = body.values
        reason = None
        if status == "incomplete":
            reason = {"reason": "max_output_tokens"}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.task.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.text("instructions"),
            "max_output_tokens": options.get("max_output_tokens"),
            "model": body.text("model") or self.service.settings.model_name,
            "output": self.output.items,
            "parallel_tool_calls": self.asked.use.parallel,
            "previous_response_id": body.text("previous_response_id"),
            "reasoning": options.get("reasoning") or {"effort": None, "summary": None},
            "store": body.flag("store", True),
            "temperature": options.get("temperature"),
            "text": options.get("text") or {"format": {"type": "text"}},
            "tool_choice": options.get("tool_choice") or "auto",
            "tools": [tool for tool in options.get("tools") or [] if tool.get("type") == "function"],
            "top_p": options.get("top_p"),
            "truncation": "disabled",
            "usage": None if self.task.completion is None else self._usage(),
            "metadata": options.get("metadata") or {},
        }

    def _usage(self) -> dict[str, Any]:
        completion = self.task.completion
        assert completion is not None
        usage = completion.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.reused, "cache_write_tokens": usage.prompt - usage.reused},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": self.task.answers[0].reasoning_tokens},
            "total_tokens": usage.prompt + usage.generated,
            "lmstate": usage_details(usage),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """All events up to the end; `output` holds the items then."""
        output = self.output
        yield output.event("response.created", response=self.object("in_progress"))
        yield output.event("response.in_progress", response=self.object("in_progress"))
        try:
            told: list[Any] = []
            async for _, piece, found in self.task.events():
                if self.wants_logprobs:
                    told = fields.token_logprobs(self.service, piece.logprobs or [])
                for one in found:
                    for out in output.take(one, told):
                        yield out
            answer = self.task.answers[0]
            status = "completed" if answer.finished in ("eos", "stop") else "incomplete"
            if not output.items:
                for out in output._begin_message():
                    yield out
            logprobs = fields.token_logprobs(self.service, answer.logprobs) if self.wants_logprobs else []
            for out in output.close(status, logprobs):
                yield out
            await self.keep(status)
            yield output.event(f"response.{status}", response=self.object(status))
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            failure = as_api_error(error)
            error_object = {"code": "server_error", "message": failure.message}
            yield output.event("response.failed", response={**self.object("failed"), "error": error_object})

    async def keep(self, status: str) -> None:
        """Remember what was sampled, and store the response unless the client said not to."""
        message = items.answer_message(self.task.answers[0])
        sampled = self.service.remember(self.task, self.task.answers[0], message.canonical())
        if not self.asked.body.flag("store", True):
            return
        instructed = self.asked.body.has("instructions")
        conversation = (*self.asked.chat.messages[1 if instructed else 0 :], message)
        stored = Stored(
            self.id,
            self.service.model.fingerprint,
            self.object(status),
            self.asked.input,
            conversation,
            sampled.tokens,
            sampled.end,
            self.asked.key,
        )
        await asyncio.to_thread(self.service.responses.put, stored)


async def create_response(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request)
    service.settings.check_model(body.text("model"))
    asked = await read(service, body)
    include = body.texts("include", 32)
    top = body.count("top_logprobs", 0, MOST_TOP, 0)
    wants_logprobs = bool(top) or "message.output_text.logprobs" in include
    stream = body.flag("stream")
    task = await service.chat(
        request.receive,
        asked.chat,
        sampling_options(body, service.vocab_size, service.model.defaults),
        use=asked.use,
        max_new_tokens=body.integer("max_output_tokens", 1, 2**31),
        constraint=asked.constraint,
        stops=stops(body),
        logprobs=top if wants_logprobs else None,
        tokens=await asyncio.to_thread(exact_tokens, service, asked),
    )
    answer = ResponseAnswer(service, task, asked, wants_logprobs)
    if stream:
        return event_stream(service, task, answer.events())
    await task.finished()
    return json_response(await whole(answer))


async def whole(answer: ResponseAnswer) -> dict[str, Any]:
    """The response of a task that ended."""
    made, output = answer.task.answers[0], answer.output
    status = "completed" if made.finished in ("eos", "stop") else "incomplete"
    if made.reasoning:
        output.items.append(items.reasoning_item(new_id("rs_"), made.reasoning, "completed"))
    if made.text or not made.calls:
        logprobs = fields.token_logprobs(answer.service, made.logprobs) if answer.wants_logprobs else []
        part = items.text_part(made.text, logprobs)
        output.items.append(items.message_item(new_id("msg_"), [part], status))
    for call in made.calls:
        output.items.append(items.call_item(new_id("fc_"), call.id, call.name, call.arguments, "completed"))
    await answer.keep(status)
    return answer.object(status)


async def read(service: Service, body: Fields) -> Asked:
    for name in ("background",):
        if body.flag(name):
            raise ApiError(f"{name} is not served here: ask without it", param=name)
    if body.has("conversation"):
        raise ApiError("conversation is not served here: use previous_response_id", param="conversation")
    previous = None
    if (id := body.text("previous_response_id", most=200)) is not None:
        previous = await asyncio.to_thread(service.responses.get, id)
        if previous is None:
            raise ApiError(
                f"the response {id!r} is not stored here (any more)",
                404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
    new, listed = items.read_input(body)
    use = fields.read_tool_use(body)
    reasoning = body.inner("reasoning")
    effort = None if reasoning is None else reasoning.text("effort")
    thinking, variables = fields.thinking_of(body)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        thinking = False if effort in ("none", "minimal") and thinking is None else thinking
    text = body.inner("text")
    constraint = fields.read_constraint(body if text is None else text, service.grammars, "format")
    instructions = body.text("instructions")
    system = [Message("system", instructions)] if instructions is not None else []
    before = [] if previous is None else list(previous.messages)
    chat = Chat((*system, *before, *new), use.offered, thinking, variables)
    return Asked(body, chat, use, constraint, listed, previous, len(system) + len(before))


def exact_tokens(service: Service, asked: Asked) -> list[int] | None:
    """The prompt as the tokens of the previous response and what is new; None where its beginning changed."""
    previous = asked.previous
    if previous is None or previous.key != asked.key or previous.model != service.model.fingerprint:
        return None
    return service.renderer.after(asked.chat, asked.answered, list(previous.tokens), previous.end)


async def _stored(service: Service, request: Request) -> Stored:
    id = request.path_params["id"]
    stored = await asyncio.to_thread(service.responses.get, id)
    if stored is None:
        raise ApiError(f"the response {id[:100]!r} is not stored here (any more)", 404)
    return stored


async def get_response(service: Service, request: Request) -> ASGIApp:
    return json_response((await _stored(service, request)).body)


async def delete_response(service: Service, request: Request) -> ASGIApp:
    stored = await _stored(service, request)
    await asyncio.to_thread(service.responses.delete, stored.id)
    return json_response({"id": stored.id, "object": "response", "deleted": True})


async def list_input(service: Service, request: Request) -> ASGIApp:
    listed = (await _stored(service, request)).input
    ids = [item.get("id") for item in listed] or [None]
    paging = {"first_id": ids[0], "last_id": ids[-1], "has_more": False}
    return json_response({"object": "list", "data": listed, **paging})


async def cancel_response(service: Service, request: Request) -> ASGIApp:
    await _stored(service, request)
    raise ApiError("only background responses are cancelled, and none is: close the stream instead")


async def count_input(service: Service, request: Request) -> ASGIApp:
    asked = await read(service, await read_body(service, request))
    exact = await asyncio.to_thread(exact_tokens, service, asked)
    tokens = exact or (await asyncio.to_thread(service.renderer.prompt, asked.chat)).tokens
    return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})
