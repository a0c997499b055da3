"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.answers import Answer, AnsweredCall, Passage, usage_details
from lmstate.serve.answer.handlers import json_response, log, read_body
from lmstate.serve.answer.messages import Call, Chat, Message, without_volatile
from lmstate.serve.answer.sampling import sampling_options, stops
from lmstate.serve.answer.service import ChatTask, Constraint, Service, ToolUse
from lmstate.serve.openai.fields import MOST_MESSAGES
from lmstate.serve.openai.tools import MOST_TOOLS, chosen_name, tool_name
from lmstate.serve.tools import CallArguments, CallStart, Event, Reasoning, Text, Tool
from lmstate.serve.wire.errors import ApiError, as_api_error
from lmstate.serve.wire.fields import Fields
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.sse import EventStream, event

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
            events = [] if self.open == "text" else self.start("text", {"type": "text", "text": ""})
            return [*events, self.delta({"type": "text_delta", "text": found.text})]
        if isinstance(found, Reasoning) and found.text:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            events = [] if self.open == "thinking" else self.start("thinking", block)
            return [*events, self.delta({"type": "thinking_delta", "thinking": found.text})]
        if isinstance(found, CallStart):
            return self.start("call", {"type": "tool_use", "id": found.id, "name": found.name, "input": {}})
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
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}

    def _stop(self, answer: Answer) -> dict[str, Any]:
        completion = self.task.completion
        assert completion is not None
        by = completion.stopped_by[0]
        if answer.finished == "stop" and isinstance(by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": by}
        reasons = {"eos": "end_turn", "stop": "end_turn", "capacity": "model_context_window_exceeded"}
        reason = reasons.get(answer.finished or "", "max_tokens")
        return {"stop_reason": "tool_use" if answer.calls and reason == "end_turn" else reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Input tokens are those that were not read from the cache."""
        completion = self.task.completion
        assert completion is not None
        usage = completion.usage
        return {
            "input_tokens": usage.prompt - usage.reused,
            "output_tokens": usage.generated,
            "cache_read_input_tokens": usage.reused,
            "cache_creation_input_tokens": 0,
            "lmstate": usage_details(usage),
        }

    async def events(self, service: Service) -> AsyncIterator[bytes]:
        usage = {
            "input_tokens": len(self.task.prompt.tokens),
            "output_tokens": 0,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
        }
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
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
            stop = self._stop(self.task.answers[0])
            yield event("message_delta", {"type": "message_delta", "delta": stop, "usage": self._usage()})
            yield event("message_stop", {"type": "message_stop"})
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            yield event("error", as_api_error(error).anthropic())


async def messages(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request)
    model = body.need_text("model")
    service.settings.check_model(model)
    longest = body.integer("max_tokens", 0, 2**31)
    if longest is None:
        raise body.wrong("max_tokens", "a whole number of 0 or more")
    chat, use = read_chat(body)
    stream = body.flag("stream")
    options = sampling_options(body, service.vocab_size, service.model.defaults)
    thinking = body.inner("thinking")
    if thinking is not None and service.renderer.reasoning is not None:  # clients send it to any model
        options["max_thinking_tokens"] = thinking.integer("budget_tokens", 0, 2**31)
    task = await service.chat(
        request.receive,
        chat,
        options,
        use=use,
        max_new_tokens=longest,
        constraint=read_format(service, body),
        stops=stops(body, "stop_sequences"),
        call_prefix="toolu_",
    )
    answer = MessageAnswer(task, model)
    if stream:
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


async def count_tokens(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request)
    service.settings.check_model(body.text("model"))
    chat, _ = read_chat(body)
    prompt = await asyncio.to_thread(service.renderer.prompt, chat)
    return json_response({"input_tokens": len(prompt.tokens)})


def read_chat(body: Fields) -> tuple[Chat, ToolUse]:
    """The conversation of a body, and how its tools may be used."""
    found = [Message("system", without_volatile(text))] if (text := _system(body)) else []
    given = body.items("messages", MOST_MESSAGES)
    if not given:
        raise body.wrong("messages", "an array of at least one message")
    for one in given:
        found += _read_message(one)
    use = _tool_use(body)
    thinking = body.inner("thinking")
    kind = None if thinking is None else thinking.choice("type", ("enabled", "disabled", "adaptive"))
    wanted = None if kind in (None, "adaptive") else kind == "enabled"
    continued = found[-1].role == "assistant" and not found[-1].calls
    config = body.inner("output_config")
    effort = None if config is None else config.text("effort", most=40)
    variables = {} if effort is None else {"reasoning_effort": effort}
    return Chat(tuple(found), use.offered, wanted, variables, continued, body.flag("control_tokens")), use


def _system(body: Fields) -> str:
    value = body.get("system")
    if value is None or isinstance(value, str):
        return value or ""
    return "\n".join(_text_block(block) for block in body.items("system"))


def _text_block(block: Fields) -> str:
    kind = block.text("type", "text")
    if kind == "text":
        return block.need_text("text")
    if kind == "tool_reference":
        return block.need_text("tool_name")
    if kind == "search_result":
        parts = [_text_block(part) for part in block.items("content")]
        return "\n".join([block.need_text("title"), block.need_text("source"), *parts])
    if kind == "document" and (source := block.inner("source")) is not None and source.text("type") == "text":
        return "\n".join(filter(None, (block.text("title"), block.text("context"), source.need_text("data"))))
    raise ApiError(f"{block.path} is of type {kind!r}; this model reads text only", param=block.path)


def _read_message(given: Fields) -> list[Message]:
    """One message becomes several where it answers several calls."""
    role = given.choice("role", ("user", "assistant", "system"))
    if role is None:
        raise given.wrong("role", "user or assistant")
    content = given.get("content")
    if isinstance(content, str):
        return [Message(role, content)]
    if not isinstance(content, list):
        raise given.wrong("content", "a string or an array of blocks")
    texts: list[str] = []
    reasoning = ""
    calls: list[Call] = []
    results: list[Message] = []
    for block in given.items("content"):
        kind = block.text("type")
        if kind == "thinking":
            reasoning += block.text("thinking") or ""
        elif kind == "tool_use" and role == "assistant":
            arguments = block.inner("input")
            values = {} if arguments is None else arguments.values
            calls.append(Call(block.need_text("id"), block.need_text("name"), json.dumps(values, ensure_ascii=False)))
        elif kind == "tool_result" and role == "user":
            results.append(Message("tool", _result(block), call_id=block.need_text("tool_use_id")))
        elif kind == "redacted_thinking" or (role == "assistant" and kind is not None and kind.endswith(ELSEWHERE)):
            continue
        else:
            texts.append(_text_block(block))
    if results and not texts:
        return results
    text = ("" if role == "assistant" else "\n").join(texts)
    return [*results, Message(role, text, reasoning, tuple(calls))]


def _result(block: Fields) -> str:
    value = block.get("content")
    if value is None or isinstance(value, str):
        return value or ""
    return "\n".join(_text_block(part) for part in block.items("content"))


def _tool_use(body: Fields) -> ToolUse:
    named: dict[str, Tool] = {}
    for given in body.items("tools", MOST_TOOLS):
        if given.text("type", "custom") != "custom":
            continue  # run by the provider, and sent to every server
        name = tool_name(given, named)
        schema = given.inner("input_schema")
        if schema is None:
            raise given.wrong("input_schema", "a JSON schema")
        description, strict = given.text("description") or "", given.flag("strict")
        named[name] = Tool(name, description, schema.values, strict, param=given.name("input_schema"))
    tools = tuple(named.values())
    choice = body.inner("tool_choice")
    if choice is None:
        return ToolUse(tools)
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    parallel = not choice.flag("disable_parallel_tool_use")
    if kind == "tool":
        return ToolUse(tools, chosen_name(choice, tools), named=True, parallel=False)
    if kind == "any" and not tools:
        raise ApiError("tool_choice is any, and no tools are given", param="tool_choice")
    return ToolUse(tools, {"any": "required"}.get(kind or "auto", kind or "auto"), parallel=parallel)


def read_format(service: Service, body: Fields) -> Constraint | None:
    """`output_config.format` (or `output_format`): a JSON schema."""
    config = body.inner("output_config")
    given = (config.inner("format") if config is not None else None) or body.inner("output_format")
    if given is None:
        return None
    if given.choice("type", ("json_schema",)) is None or not given.has("schema"):
        raise given.wrong("schema", "a JSON schema, with type json_schema")
    name = given.name("schema")
    return Constraint(service.grammars.json_schema(given.get("schema"), name), name)


def block_of(part: Passage | AnsweredCall) -> dict[str, Any]:
    """The content block of a part of an answer."""
    if isinstance(part, AnsweredCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": as_object(part.arguments)}
    if part.kind is Text:
        return {"type": "text", "text": part.text}
    return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}


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
