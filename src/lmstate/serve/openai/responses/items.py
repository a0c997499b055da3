"""The items that responses are made of, as messages and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmstate.serve.answer.answers import Answer
from lmstate.serve.answer.messages import Call, Message
from lmstate.serve.openai.fields import MOST_MESSAGES, ROLES, read_content
from lmstate.serve.openai.responses.compaction import summary_of
from lmstate.serve.openai.tools import full_name
from lmstate.serve.tools import Tool
from lmstate.serve.tools.custom import arguments_of, input_of
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.fields import Fields
from lmstate.serve.wire.ids import new_id

Find = Callable[[str], dict[str, Any] | None]

PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "compaction": "cmp_",
}
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
# Calls that a provider ran itself: clients that changed servers in between send them on, and no model here made them.
ELSEWHERE = (
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "code_interpreter_call",
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
)


def _function_call(item: Fields) -> Call:
    name = full_name(item.text("namespace"), item.need_text("name"))
    return Call(item.need_text("call_id"), name, item.text("arguments") or "{}")


def _custom_call(item: Fields) -> Call:
    return Call(item.need_text("call_id"), item.need_text("name"), arguments_of(item.text("input") or ""))


def _shell_call(item: Fields) -> Call:
    action = item.inner("action")
    arguments = json.dumps({} if action is None else action.values, ensure_ascii=False)
    return Call(item.text("call_id") or item.need_text("id"), "local_shell", arguments)


CALLS: dict[str, Callable[[Fields], Call]] = {
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _shell_call,
}


def read_input(body: Fields, find: Find) -> tuple[list[Message], list[dict[str, Any]]]:
    """(the messages of `input`, its items as the client may list them later)."""
    given = body.get("input")
    if isinstance(given, str):
        body = Fields({"input": [{"type": "message", "role": "user", "content": given}]})
    elif given is None and (body.has("previous_response_id") or body.has("conversation")):
        return [], []  # what came before is gone on with
    elif not isinstance(given, list) or not given:
        raise body.wrong("input", "a string or an array of items")
    return read_items(body, "input", find)


def read_items(body: Fields, key: str, find: Find) -> tuple[list[Message], list[dict[str, Any]]]:
    """(the messages of an array of items, the items in full). `find` gives the item that one refers to by its id."""
    messages: list[Message] = []
    items = []
    for one in body.items(key, MOST_MESSAGES):
        kind = one.text("type") or ("message" if one.has("role") else "item_reference")
        if kind == "item_reference":
            id = one.need_text("id")
            if (known := find(id)) is None:
                raise ApiError(f"{one.path} refers to {id[:100]!r}, which is not stored here (any more)", 404, one.path)
            one = Fields(known, one.path)
            kind = known["type"]
        _read_item(one, kind, messages)
        given = one.text("id", most=200)
        ours = given is not None and find(given) is not None  # else another client may name its own item alike
        items.append(_in_full(one, kind, given if ours else None))
    return messages, items


def _in_full(item: Fields, kind: str, id: str | None) -> dict[str, Any]:
    """An item with all that the protocol's types have, as it is listed; without an `id` it gets one."""
    shown = {**item.values, "type": kind, "id": id or new_id(PREFIXES.get(kind, "item_"))}
    if kind == "message":
        output = item.get("role") == "assistant"
        content = item.get("content")
        if isinstance(content, str):
            content = [{"type": "output_text" if output else "input_text", "text": content}]
        shown["content"] = [{"annotations": [], **part} if output else part for part in content]
    if kind == "reasoning":
        return {"summary": [], **shown}
    return {**shown, "status": item.text("status", most=20) or "completed"}


def listing(items: Sequence[dict[str, Any]], more: bool = False) -> dict[str, Any]:
    ids = [item["id"] for item in items] or [""]
    return {"object": "list", "data": list(items), "first_id": ids[0], "last_id": ids[-1], "has_more": more}


def paged(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The page of a list that `limit`, `order` (`desc` unless said) and `after` ask for."""
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= 100):
        raise ApiError(f"limit must be a whole number from 1 to 100; it is {limit[:40]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise ApiError(f"order must be asc or desc; it is {order[:40]!r}", param="order")
    ordered = list(items) if order == "asc" else list(items)[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise ApiError(f"after names {after[:100]!r}, which is not in the list", 404, param="after")
        ordered = ordered[ids.index(after) + 1 :]
    return listing(ordered[: int(limit)], len(ordered) > int(limit))


def _read_item(item: Fields, kind: str, messages: list[Message]) -> None:
    """Add an item. Reasoning, text and calls that follow each other are one message of the assistant."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if kind == "message":
        role = item.choice("role", tuple(ROLES))
        if role is None or not isinstance(item.get("content"), str | list):
            raise item.wrong("role" if role is None else "content", "a role and content")
        content = read_content(item, "content", role)
        if role == "assistant" and last is not None and (last.calls or not last.content):
            messages[-1] = replace(last, content=last.content + content)
        else:
            messages.append(Message(ROLES[role], content))
    elif kind == "reasoning":
        text = read_content(item, "content") or read_content(item, "summary")
        messages.append(Message("assistant", reasoning=text))
    elif kind in CALLS:
        call = CALLS[kind](item)
        if last is None:
            messages.append(Message("assistant", calls=(call,)))
        else:
            messages[-1] = replace(last, calls=(*last.calls, call))
    elif kind in OUTPUTS:
        if not item.has("output"):
            raise item.wrong("output", "a string or an array of parts")
        id = item.text("call_id") if kind != "local_shell_call_output" else item.text("call_id") or item.text("id")
        messages.append(Message("tool", read_content(item, "output", "tool"), call_id=id or item.need_text("call_id")))
    elif kind == "compaction":
        messages.append(Message("user", summary_of(item)))
    elif kind not in ELSEWHERE:
        raise ApiError(f"{item.path} is of type {kind[:60]!r}, which is not served here", param=item.path)


def reasoning_item(id: str, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}


def text_part(text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def message_item(id: str, parts: list[Any], status: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "content": parts, "status": status}


def call_item(call_id: str, name: str, arguments: str, status: str, tool: Tool | None) -> dict[str, Any]:
    """The call of a function, or of a custom tool, by its name as the client knows it."""
    called = {"call_id": call_id, "name": name, "status": status}
    if tool is not None and tool.custom:
        return {"id": new_id("ctc_"), "type": "custom_tool_call", **called, "input": input_of(arguments)}
    if tool is not None and tool.own is not None:
        called["namespace"], called["name"] = tool.own
    return {"id": new_id("fc_"), "type": "function_call", **called, "arguments": arguments}


def answer_message(answer: Answer) -> Message:
    """An answer as the message that the next turn begins with."""
    calls = tuple(Call(call.id, call.name, call.arguments) for call in answer.calls)
    return Message("assistant", answer.text, answer.reasoning, calls)
