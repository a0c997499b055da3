"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve import openai_fields as fields
from lmstate.serve.answers import Answer, new_id
from lmstate.serve.errors import as_api_error
from lmstate.serve.fields import Fields
from lmstate.serve.http import json_response, log, read_body
from lmstate.serve.messages import Chat
from lmstate.serve.sampling import sampling_options, stops
from lmstate.serve.service import ChatTask, Service, ToolUse
from lmstate.serve.sse import DONE, EventStream, comment, data
from lmstate.serve.tools import CallArguments, CallStart, Event, Reasoning, Text

if TYPE_CHECKING:
    from lmstate.engine import Piece

MOST_ANSWERS, MOST_TOP = 128, 20


@dataclass(frozen=True)
class ChatAnswer:
    """An answer in the form of chat completions."""

    service: Service
    task: ChatTask
    id: str
    model: str
    wants_logprobs: bool
    wants_usage: bool
    wants_ids: bool = False  # of tokens

    def head(self, kind: str) -> dict[str, Any]:
        created = self.task.created
        return {"id": self.id, "object": kind, "created": created, "model": self.model, "system_fingerprint": None}

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
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        logprobs = None
        if self.wants_logprobs:
            logprobs = {"content": fields.token_logprobs(self.service, answer.logprobs), "refusal": None}
        reason = fields.finish_reason(answer, bool(answer.calls))
        choice = {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return {**choice, "token_ids": answer.tokens} if self.wants_ids else choice

    async def chunks(self) -> AsyncIterator[bytes]:
        """The stream. The first chunk of an answer has its role, the last its finish_reason; then the usage."""
        for answer in self.task.answers:
            yield self._chunk(answer.index, {"role": "assistant", "content": ""}, first=True)
        untold: dict[int, list[Piece]] = {}  # pieces whose tokens no chunk told of yet
        try:
            async for answer, piece, events in self.task.events():
                index = answer.index
                untold.setdefault(index, []).append(piece)
                for delta in deltas(events, len(answer.calls)):
                    yield self._chunk(index, delta, told=untold.pop(index, ()))
                if piece.finished is not None:
                    reason = fields.finish_reason(answer, bool(answer.calls))
                    yield self._chunk(index, {}, reason, untold.pop(index, ()))
            self.service.remember_answers(self.task)
            if self.wants_usage:
                usage = fields.usage_of(self.task.completion, self.task.answers)
                timings = fields.timings_of(self.task.completion)
                yield data({**self.head("chat.completion.chunk"), "choices": [], "usage": usage, "timings": timings})
            yield DONE
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            yield data(as_api_error(error).openai())

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        told: Sequence[Piece] = (),
        first: bool = False,
    ) -> bytes:
        """`told` are the pieces whose log probabilities and tokens the chunk tells of."""
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if self.wants_logprobs and (logprobs := [one for piece in told for one in piece.logprobs or ()]):
            choice["logprobs"] = {"content": fields.token_logprobs(self.service, logprobs), "refusal": None}
        if self.wants_ids:
            choice["token_ids"] = [token for piece in told for token in piece.tokens]
        chunk = {**self.head("chat.completion.chunk"), "choices": [choice]}
        if first and self.wants_ids:
            chunk["prompt_token_ids"] = self.task.prompt.tokens
        return data({**chunk, "usage": None} if self.wants_usage else chunk)


def deltas(events: list[Event], calls: int) -> list[dict[str, Any]]:
    """The deltas of one piece; `calls` counts the answer's calls up to now, those of `events` included."""
    at = calls - sum(isinstance(event, CallStart) for event in events) - 1
    found: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Text):
            found.append({"content": event.text})
        elif isinstance(event, Reasoning):
            found.append({"reasoning_content": event.text, "reasoning": event.text})
        elif isinstance(event, CallStart):
            at += 1
            function = {"name": event.name, "arguments": ""}
            found.append({"tool_calls": [{"index": at, "id": event.id, "type": "function", "function": function}]})
        elif isinstance(event, CallArguments) and event.text:
            found.append({"tool_calls": [{"index": at, "function": {"arguments": event.text}}]})
    return found


async def chat_completions(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request)
    model = body.text("model")
    service.settings.check_model(model)
    chat, use = read_chat(body)
    wants_logprobs = body.flag("logprobs")
    top = body.count("top_logprobs", 0, MOST_TOP, 0)
    count = body.count("n", 1, MOST_ANSWERS, 1)
    stream = body.flag("stream")
    stream_options = body.inner("stream_options")
    task = await service.chat(
        request.receive,
        chat,
        sampling_options(body, service.vocab_size, service.model.defaults),
        use=use,
        max_new_tokens=body.integer("max_completion_tokens", 0, 2**31, body.integer("max_tokens", 0, 2**31)),
        constraint=fields.read_constraint(body, service.grammars),
        stops=stops(body),
        count=count,
        logprobs=top if wants_logprobs else None,
    )
    wants_usage = stream_options is not None and stream_options.flag("include_usage")
    name = model or service.settings.model_name
    wants_ids = body.flag("return_token_ids")
    answer = ChatAnswer(service, task, new_id("chatcmpl-"), name, wants_logprobs, wants_usage, wants_ids)
    if stream:
        return event_stream(service, task, answer.chunks())
    await task.finished()
    service.remember_answers(task)
    return json_response(answer.whole())


def read_chat(body: Fields) -> tuple[Chat, ToolUse]:
    """The conversation of a chat body, and how its tools may be used."""
    messages = fields.read_messages(body)
    use = fields.read_tool_use(body)
    thinking, variables = fields.thinking_of(body)
    continued = body.flag("continue_final_message")
    if continued and messages[-1].role != "assistant":
        raise body.wrong("continue_final_message", "false where the last message is not the assistant's")
    return Chat(messages, use.offered, thinking, variables, continued, body.flag("control_tokens")), use


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
