"""The items that responses are made of, as messages and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmstate.serve.answers import Answer, new_id
from lmstate.serve.errors import ApiError
from lmstate.serve.fields import Fields
from lmstate.serve.messages import Call, Message
from lmstate.serve.openai_fields import MOST_MESSAGES, ROLES, read_content


def read_input(body: Fields) -> tuple[list[Message], list[Any]]:
    """(the messages of `input`, its items as the client may list them later)."""
    given = body.get("input")
    if isinstance(given, str):
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}
        return [Message("user", given)], [{"id": new_id("msg_"), "status": "completed", **item}]
    if not isinstance(given, list) or not given:
        raise body.wrong("input", "a string or an array of items")
    messages: list[Message] = []
    items = []
    for one in body.items("input", MOST_MESSAGES):
        kind = one.text("type", "message") or "message"
        _read_item(one, kind, messages)
        items.append({"id": new_id("item_"), **one.values, "type": kind})
    return messages, items


def _read_item(item: Fields, kind: str, messages: list[Message]) -> None:
    """Add an item. Reasoning, text and calls that follow each other are one message of the assistant."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if kind == "message":
        role = item.choice("role", tuple(ROLES))
        if role is None or not item.has("content"):
            raise item.wrong("role" if role is None else "content", "a role and content")
        content = read_content(item, "content")
        if role == "assistant" and last is not None and not last.content and not last.calls:
            messages[-1] = replace(last, content=content)
        else:
            messages.append(Message(ROLES[role], content))
    elif kind == "reasoning":
        text = read_content(item, "content") or read_content(item, "summary")
        messages.append(Message("assistant", reasoning=text))
    elif kind == "function_call":
        call = Call(item.need_text("call_id"), item.need_text("name"), item.text("arguments") or "{}")
        if last is None:
            messages.append(Message("assistant", calls=(call,)))
        else:
            messages[-1] = replace(last, calls=(*last.calls, call))
    elif kind == "function_call_output":
        if not item.has("output"):
            raise item.wrong("output", "a string or an array of parts")
        messages.append(Message("tool", read_content(item, "output"), call_id=item.need_text("call_id")))
    else:
        raise ApiError(f"{item.path} is of type {kind[:60]!r}, which is not served here", param=item.path)


def reasoning_item(id: str, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}


def text_part(text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def message_item(id: str, parts: list[Any], status: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "content": parts, "status": status}


def call_item(id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def answer_message(answer: Answer) -> Message:
    """An answer as the message that the next turn begins with."""
    calls = tuple(Call(call.id, call.name, call.arguments) for call in answer.calls)
    return Message("assistant", answer.text, answer.reasoning, calls)
