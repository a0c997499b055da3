"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.answers import Answer, AnsweredCall
from lmstate.serve.answer.handlers import json_response, log
from lmstate.serve.answer.messages import Chat
from lmstate.serve.answer.sampling import sampling_params, stops
from lmstate.serve.answer.service import ChatTask, Service, ToolUse
from lmstate.serve.openai import fields
from lmstate.serve.openai.tools import read_tool_use
from lmstate.serve.tools import CallArguments, Event, Reasoning, Text
from lmstate.serve.tools.custom import input_of
from lmstate.serve.wire.body import wrong
from lmstate.serve.wire.errors import as_api_error
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.schema.chat import ChatBody, ChatFields, ChatMessage
from lmstate.serve.wire.sse import DONE, EventStream, comment, data

if TYPE_CHECKING:
    from lmstate.engine import TokenLogprob


@dataclass(frozen=True)
class ChatAnswer:
    """An answer in the form of chat completions."""

    service: Service
    task: ChatTask
    id: str
    model: str
    wants_logprobs: bool
    stream_usage: fields.StreamUsage | None
    wants_ids: bool = False  # of tokens
    custom: frozenset[str] = frozenset()  # names of custom tools

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.task.created,
            "model": self.model,
            "system_fingerprint": fields.system_fingerprint(self.service),
        }

    @cached_property
    def _chunk_head(self) -> dict[str, Any]:
        return self.head("chat.completion.chunk")

    def whole(self) -> dict[str, Any]:
        completion = self.task.completion
        choices = [self._choice(answer) for answer in self.task.answers]
        return {
            **self.head("chat.completion"),
            "choices": choices,
            "usage": fields.usage_of(completion, self.task.answers),
            "timings": fields.timings_of(completion),
            **({"prompt_token_ids": self.task.prompt.tokens} if self.wants_ids else {}),
        }

    def _choice(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
        if not answer.calls:
            message["content"] = answer.text
        if answer.reasoning:
            message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
        if answer.calls:
            message["tool_calls"] = [self._call(call) for call in answer.calls]
        logprobs = None
        if self.wants_logprobs:
            told = fields.token_logprobs(self.service, answer.logprobs[: answer.certain])
            logprobs = {"content": told, "refusal": None}
        reason = fields.finish_reason(answer, bool(answer.calls))
        choice = {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return {**choice, "token_ids": answer.tokens} if self.wants_ids else choice

    def _call(self, call: AnsweredCall) -> dict[str, Any]:
        if call.name in self.custom:
            custom = {"name": call.name, "input": input_of(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The stream. The first chunk of an answer has its role, the last its finish_reason; then the usage."""
        for answer in self.task.answers:
            yield self._chunk(answer, {"role": "assistant", "content": ""}, first=True)
        deltas = [Deltas(self.custom) for _ in self.task.answers]
        ended: set[int] = set()
        try:
            async for answer, _, events in self.task.events():
                index = answer.index
                if index in ended:
                    continue  # of an answer that was cut, while others go on
                found = [delta for event in events for delta in deltas[index].take(event)]
                if answer.finished is not None:
                    found += deltas[index].end_call()
                for delta in found:
                    yield self._chunk(answer, delta, told=deltas[index].fresh(answer))
                if answer.finished is not None:
                    ended.add(index)
                    reason = fields.finish_reason(answer, bool(answer.calls))
                    yield self._chunk(answer, {}, reason, deltas[index].fresh(answer))
            self.service.remember_answers(self.task)
            if self.stream_usage is not None:
                usage = fields.usage_of(self.task.completion, self.task.answers)
                timings = fields.timings_of(self.task.completion)
                yield data({**self._chunk_head, "choices": [], "usage": usage, "timings": timings})
            yield DONE
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            yield data(as_api_error(error).openai())

    def _chunk(
        self,
        answer: Answer,
        delta: dict[str, Any],
        reason: str | None = None,
        told: tuple[list[int], list[TokenLogprob]] = ([], []),
        first: bool = False,
    ) -> bytes:
        """`told` are the tokens and the log probabilities that the chunk tells of."""
        choice: dict[str, Any] = {"index": answer.index, "delta": delta, "finish_reason": reason}
        ids, logprobs = told
        if self.wants_logprobs and logprobs:
            choice["logprobs"] = {"content": fields.token_logprobs(self.service, logprobs), "refusal": None}
        if self.wants_ids:
            choice["token_ids"] = ids
        chunk = {**self._chunk_head, "choices": [choice]}
        if first and self.wants_ids:
            chunk["prompt_token_ids"] = self.task.prompt.tokens
        if self.stream_usage is not None:
            generated = sum(len(one.tokens) for one in self.task.answers)
            chunk |= self.stream_usage.shown(len(self.task.prompt.tokens), generated)
        return data(chunk)


@dataclass
class Deltas:
    """The deltas of one answer, from its events in turn. The input of a custom tool comes whole, as its call ends."""

    custom: frozenset[str]
    calls: int = 0
    _arguments: str | None = field(default=None, init=False)  # of the custom call that is open
    _told: tuple[int, int] = field(default=(0, 0), init=False)  # tokens and log probabilities

    def fresh(self, answer: Answer) -> tuple[list[int], list[TokenLogprob]]:
        """The tokens and the log probabilities that no chunk told of yet; those of a stop string are never told."""
        ids, logprobs = self._told
        self._told = len(answer.tokens), answer.certain
        return answer.tokens[ids:], answer.logprobs[logprobs : answer.certain]

    def take(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, CallArguments):
            if self._arguments is not None:  # the input is known when the JSON around it is
                self._arguments += event.text
                return []
            return [self._call({"function": {"arguments": event.text}})] if event.text else []
        ended = self.end_call()
        if isinstance(event, Text):
            return [*ended, {"content": event.text}]
        if isinstance(event, Reasoning):
            return [*ended, {"reasoning_content": event.text, "reasoning": event.text}]
        self.calls += 1
        if event.name in self.custom:
            self._arguments = ""
            called: dict[str, Any] = {"type": "custom", "custom": {"name": event.name, "input": ""}}
        else:
            called = {"type": "function", "function": {"name": event.name, "arguments": ""}}
        return [*ended, self._call({"id": event.id, **called})]

    def end_call(self) -> list[dict[str, Any]]:
        """The input of the custom call that is open."""
        arguments, self._arguments = self._arguments, None
        return [] if arguments is None else [self._call({"custom": {"input": input_of(arguments)}})]

    def _call(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.calls - 1, **values}]}


async def chat_completions(service: Service, request: Request, body: ChatBody) -> ASGIApp:
    chat, use = read_chat(body, body.messages)
    task = await service.chat(
        request.receive,
        chat,
        replace(
            sampling_params(body, service.vocab_size, service.model.defaults),
            stop=stops(body.stop),
            n=body.n or 1,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
        use=use,
        max_new_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        constraint=fields.read_constraint(body, body.response_format),
    )
    name = body.model or service.settings.model_name
    answer = ChatAnswer(
        service,
        task,
        new_id("chatcmpl-"),
        name,
        bool(body.logprobs),
        fields.StreamUsage.of(body),
        bool(body.return_token_ids),
        use.custom,
    )
    if body.stream:
        return event_stream(service, task, answer.chunks())
    await task.finished()
    service.remember_answers(task)
    return json_response(answer.whole())


def read_chat(body: ChatFields, given: Sequence[ChatMessage]) -> tuple[Chat, ToolUse]:
    """The conversation of a chat body, and how its tools may be used."""
    messages = fields.read_messages(given)
    use = read_tool_use(body, wrapped=True)
    thinking, variables = fields.thinking_of(body)
    continued = bool(body.continue_final_message)
    if continued and messages[-1].role != "assistant":
        raise wrong("continue_final_message", "false where the last message is not the assistant's", True)
    return Chat(messages, use.tools, thinking, variables, continued, bool(body.control_tokens)), use


def event_stream(service: Service, task: ChatTask, events: AsyncIterator[bytes]) -> EventStream:
    settings = service.settings
    return EventStream(
        events,
        lambda: comment(task.progress()),
        settings.ping_interval,
        settings.write_timeout,
        {},
        closed=task.request.cancel,
    )
