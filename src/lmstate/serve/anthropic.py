"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.answers import Answer, AnsweredCall, Passage, usage_details
from lmstate.serve.answer.handlers import json_response, log
from lmstate.serve.answer.messages import Call, Chat, Message, without_volatile
from lmstate.serve.answer.pictures import picture_mark
from lmstate.serve.answer.sampling import sampling_params, stops
from lmstate.serve.answer.service import ChatTask, Service, ToolUse
from lmstate.serve.openai.tools import chosen_name, kind_of, tool_name
from lmstate.serve.tools import CallArguments, CallStart, Event, Reasoning, Text, Tool
from lmstate.serve.wire.body import read, wrong
from lmstate.serve.wire.errors import ApiError, as_api_error
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.schema.messages import (
    AnthropicMessage,
    AnthropicTool,
    BlockContent,
    CountBody,
    DocumentBlock,
    ImageBlock,
    MessagesBody,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from lmstate.serve.wire.sse import EventStream, event
from lmstate.text.grammars.constraint import Constraint

PING = event("ping", {"type": "ping"})


@dataclass
class Blocks:
    """The content blocks of a stream: one is open at a time."""

    open: str = ""
    index: int = -1

    def start(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        events = self.stop()
        self.open, self.index = kind, self.index + 1
        start = {"type": "content_block_start", "index": self.index, "content_block": block}
        return [*events, event("content_block_start", start)]

    def delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", {"type": "content_block_delta", "index": self.index, "delta": delta})

    def stop(self) -> list[bytes]:
        if not self.open:
            return []
        events = [event("content_block_stop", {"type": "content_block_stop", "index": self.index})]
        if self.open == "thinking":
            events.insert(0, self.delta({"type": "signature_delta", "signature": SIGNATURE}))
        self.open = ""
        return events

    def take(self, found: Event) -> list[bytes]:
        """The protocol's events for one of ours."""
        if isinstance(found, Text) and found.text:
            events = [] if self.open == "text" else self.start("text", {"type": "text", "text": "", "citations": None})
            return [*events, self.delta({"type": "text_delta", "text": found.text})]
        if isinstance(found, Reasoning) and found.text:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            events = [] if self.open == "thinking" else self.start("thinking", block)
            return [*events, self.delta({"type": "thinking_delta", "thinking": found.text, "estimated_tokens": None})]
        if isinstance(found, CallStart):
            return self.start("call", tool_use_block(found.id, found.name, {}))
        if isinstance(found, CallArguments) and found.text:
            return [self.delta({"type": "input_json_delta", "partial_json": found.text})]
        return []


# Calls that a provider ran itself (server_tool_use, web_search_tool_result, mcp_tool_use): clients that changed servers
# in between send them on, and no model here made them.
ELSEWHERE = ("_tool_use", "_tool_result")

# Clients send thinking back with the signature that it came with; ours is not secret, since nothing is trusted by it.
SIGNATURE = "lmstate"


@dataclass(frozen=True)
class MessageAnswer:
    """An answer in the form of the Messages API."""

    task: ChatTask
    model: str
    id: str = field(default_factory=lambda: new_id("msg_"))

    def whole(self) -> dict[str, Any]:
        answer = self.task.answers[0]
        return {
            **self._head(),
            "content": list(map(block_of, answer.parts)),
            **self._stop(answer),
            "usage": self._usage(),
        }

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "container": None,
            "context_management": None,
            "diagnostics": None,
        }

    def _stop(self, answer: Answer) -> dict[str, Any]:
        reason, sequence = self._stopped(answer)
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}

    def _stopped(self, answer: Answer) -> tuple[str, str | None]:
        """(stop_reason, stop_sequence)"""
        completion = self.task.completion
        assert completion is not None
        by = completion.stopped_by[0]
        if answer.finished == "stop" and isinstance(by, str):
            return "stop_sequence", by
        reasons = {"eos": "end_turn", "stop": "end_turn", "capacity": "model_context_window_exceeded"}
        reason = reasons.get(answer.finished or "", "max_tokens")
        return "tool_use" if answer.calls and reason == "end_turn" else reason, None

    def _usage(self) -> dict[str, Any]:
        completion = self.task.completion
        assert completion is not None
        usage, thought = completion.usage, self.task.answers[0].reasoning_tokens
        counts = usage_of(usage.prompt, usage.reused, usage.generated, thought)
        return {**counts, "lmstate": usage_details(usage)}

    async def events(self, service: Service) -> AsyncIterator[bytes]:
        reused = await self.task.request.begun()  # clients count the input by this event; pings go on meanwhile
        usage = usage_of(len(self.task.prompt.tokens), reused)
        stop = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
        message = {**self._head(), "content": [], **stop, "usage": usage}
        yield event("message_start", {"type": "message_start", "message": message})
        blocks = Blocks()
        try:
            async for _, _, found in self.task.events():
                for one in found:
                    for out in blocks.take(one):
                        yield out
            service.remember_answers(self.task)
            for out in blocks.stop():
                yield out
            delta = {**self._stop(self.task.answers[0]), "container": None}
            told = {"type": "message_delta", "delta": delta, "usage": self._usage(), "context_management": None}
            yield event("message_delta", told)
            yield event("message_stop", {"type": "message_stop"})
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            yield event("error", as_api_error(error).anthropic())


async def messages(service: Service, request: Request, body: MessagesBody) -> ASGIApp:
    if body.thread is not None:  # of which only new messages come: an answer to them alone would be a wrong one
        raise ApiError(
            "thread is not supported here: send the full conversation without it",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": []},
        )
    chat, use = read_chat(body)
    params = sampling_params(body, service.vocab_size, service.model.defaults)
    params = replace(params, stop=stops(body.stop_sequences))
    if body.thinking is not None and service.renderer.reasoning is not None:  # clients send it to any model
        params = replace(params, max_thinking_tokens=body.thinking.budget_tokens)
    task = await service.chat(
        request.receive,
        chat,
        params,
        use=use,
        max_new_tokens=body.max_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        constraint=read_format(body),
        call_prefix="toolu_",
    )
    answer = MessageAnswer(task, body.model)
    if body.stream:
        settings = service.settings
        return EventStream(
            answer.events(service),
            lambda: PING,
            settings.ping_interval,
            settings.write_timeout,
            {},
            closed=task.request.cancel,
        )
    await task.finished()
    service.remember_answers(task)
    return json_response(answer.whole())


async def count_tokens(service: Service, request: Request, body: CountBody) -> ASGIApp:
    chat, _ = read_chat(body)
    prompt = await asyncio.to_thread(service.renderer.prompt, chat)
    return json_response({"input_tokens": len(prompt.tokens)})


def read_chat(body: CountBody) -> tuple[Chat, ToolUse]:
    """The conversation of a body, and how its tools may be used."""
    text, _ = _texts(body.system, "system")
    found = [Message("system", without_volatile(text))] if text else []
    for index, one in enumerate(body.messages):
        found += _read_message(one, f"messages[{index}]")
    use = _tool_use(body)
    kind = None if body.thinking is None else body.thinking.type
    wanted = None if kind in (None, "adaptive") else kind == "enabled"
    continued = found[-1].role == "assistant" and not found[-1].calls
    effort = None if body.output_config is None else body.output_config.effort
    variables = {} if effort is None else {"reasoning_effort": effort}
    return Chat(tuple(found), use.tools, wanted, variables, continued, bool(body.control_tokens)), use


def _texts(content: BlockContent | None, path: str) -> tuple[str, tuple[str, ...]]:
    """(text, or that of blocks, each a line of its own; the URLs of pictures)."""
    if content is None or isinstance(content, str):
        return content or "", ()
    texts, urls = [], []
    for index, block in enumerate(content):
        where = f"{path}[{index}]"
        url = _picture(block, where) if kind_of(block, where, "text") == "image" else None
        texts.append(_text_block(block, where) if url is None else picture_mark(url))
        urls += [] if url is None else [url]
    return "\n".join(texts), tuple(urls)


def _picture(block: dict[str, Any], path: str) -> str:
    """The URL of a picture: one with its data, where it came so."""
    source = read(block, ImageBlock, path).source
    if source.type == "url":
        if source.url is None:
            raise wrong(f"{path}.source.url", "a string", None)
        return source.url
    if source.data is None:
        raise wrong(f"{path}.source.data", "a string", None)
    return f"data:{source.media_type or 'image/png'};base64,{source.data}"


def _text_block(block: dict[str, Any], path: str) -> str:
    kind = kind_of(block, path, "text")
    if kind == "text":
        return read(block, TextBlock, path).text
    if kind == "tool_reference":
        return read(block, ToolReferenceBlock, path).tool_name
    if kind == "search_result":
        found = read(block, SearchResultBlock, path)
        parts = [_text_block(part, f"{path}.content[{index}]") for index, part in enumerate(found.content or ())]
        return "\n".join([found.title, found.source, *parts])
    if kind == "document":
        document = read(block, DocumentBlock, path)
        if document.source is not None and document.source.type == "text":
            if document.source.data is None:
                raise wrong(f"{path}.source.data", "a string", None)
            return "\n".join(filter(None, (document.title, document.context, document.source.data)))
    raise ApiError(f"{path} is of type {kind!r}; text and pictures in messages are read here", param=path)


def _read_message(given: AnthropicMessage, path: str) -> list[Message]:
    """One message becomes several where it answers several calls."""
    role, content = given.role, given.content
    if isinstance(content, str):
        return [Message(role, content)]
    texts: list[str] = []
    pictures: list[str] = []
    reasoning = ""
    calls: list[Call] = []
    results: list[Message] = []
    for index, block in enumerate(content):
        where = f"{path}.content[{index}]"
        kind = kind_of(block, where, "text")
        if kind == "thinking":
            reasoning += read(block, ThinkingBlock, where).thinking or ""
        elif kind == "tool_use" and role == "assistant":
            call = read(block, ToolUseBlock, where)
            calls.append(Call(call.id, call.name, json.dumps(call.input or {}, ensure_ascii=False)))
        elif kind == "tool_result" and role == "user":
            result = read(block, ToolResultBlock, where)
            text, urls = _texts(result.content, f"{where}.content")
            results.append(Message("tool", text, call_id=result.tool_use_id, pictures=urls))
        elif kind == "image":
            pictures.append(_picture(block, where))
            texts.append(picture_mark(pictures[-1]))
        elif kind == "redacted_thinking" or (role == "assistant" and kind.endswith(ELSEWHERE)):
            continue
        else:
            texts.append(_text_block(block, where))
    if results and not texts:
        return results
    text = ("" if role == "assistant" else "\n").join(texts)
    return [*results, Message(role, text, reasoning, tuple(calls), pictures=tuple(pictures))]


def _tool_use(body: CountBody) -> ToolUse:
    named: dict[str, Tool] = {}
    for index, one in enumerate(body.tools or ()):
        path = f"tools[{index}]"
        if kind_of(one, path, "custom") != "custom":
            continue  # run by the provider, and sent to every server
        given = read(one, AnthropicTool, path)
        name = tool_name(given.name, path, named)
        named[name] = Tool(
            name, given.description or "", given.input_schema, bool(given.strict), param=f"{path}.input_schema"
        )
    tools = tuple(named.values())
    choice = body.tool_choice
    if choice is None:
        return ToolUse(tools)
    kind, parallel = choice.type or "auto", not choice.disable_parallel_tool_use
    if kind == "tool":
        return ToolUse(tools, chosen_name(choice.name, "tool_choice.name", tools), named=True, parallel=False)
    if kind == "any" and not tools:
        raise ApiError("tool_choice is any, and no tools are given", param="tool_choice")
    return ToolUse(tools, "required" if kind == "any" else kind, parallel=parallel)


def read_format(body: CountBody) -> Constraint | None:
    """`output_config.format` (or `output_format`): a JSON schema."""
    given, name = None if body.output_config is None else body.output_config.format, "output_config.format.schema"
    if given is None:
        given, name = body.output_format, "output_format.schema"
    return None if given is None else Constraint.of_schema(given.schema, name)


def usage_of(prompt: int, reused: int, generated: int = 0, thought: int = 0) -> dict[str, Any]:
    """Counts of tokens. Input tokens are those that were not read from the cache."""
    return {
        "input_tokens": prompt - reused,
        "output_tokens": generated,
        "output_tokens_details": {"thinking_tokens": thought},
        "cache_read_input_tokens": reused,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
        "service_tier": "standard",
        "inference_geo": None,
        "server_tool_use": None,
        "iterations": None,
        "speed": None,
    }


def block_of(part: Passage | AnsweredCall) -> dict[str, Any]:
    """The content block of a part of an answer."""
    if isinstance(part, AnsweredCall):
        return tool_use_block(part.id, part.name, as_object(part.arguments))
    if part.kind is Text:
        return {"type": "text", "text": part.text, "citations": None}
    return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}


def tool_use_block(id: str | None, name: str, input: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input, "caller": {"type": "direct"}}


def as_object(text: str) -> dict[str, Any]:
    """A call's arguments; of those that were cut off, the values that are whole, as clients read the streamed ones."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return whole_values(text)
    return value if isinstance(value, dict) else {"_value": value}


def whole_values(text: str) -> dict[str, Any]:
    """The object that the beginning of a JSON text holds, without the value, or the name of one, that was cut off."""
    # The last places where it may be closed, and with what: after the name of a value it cannot, but before that.
    ends: deque[tuple[int, str]] = deque(maxlen=4)
    closing, quoted, escaped = "", False, False
    for at, letter in enumerate(text):
        if quoted:
            escaped, quoted = letter == "\\" and not escaped, letter != '"' or escaped
            if not quoted:
                ends.append((at + 1, closing))
        elif letter == '"':
            quoted = True
        elif letter == ",":
            ends.append((at, closing))
        elif letter in "{[":
            closing = ("}" if letter == "{" else "]") + closing
            ends.append((at + 1, closing))
        elif letter in "}]":
            closing = closing[1:]
            ends.append((at + 1, closing))
    if not quoted and text.endswith(("true", "false", "null")):
        ends.append((len(text), closing))
    for end, close in reversed(ends):
        with suppress(ValueError, RecursionError):
            value = json.loads(text[:end] + close)
            return value if isinstance(value, dict) else {}
    return {}
