"""The items that responses are made of, as messages and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmstate.serve.answer.answers import Answer
from lmstate.serve.answer.messages import Call, Message
from lmstate.serve.openai.fields import ROLES, read_content
from lmstate.serve.openai.responses.compaction import summary_of
from lmstate.serve.openai.tools import full_name, kind_of
from lmstate.serve.tools import Tool
from lmstate.serve.tools.custom import arguments_of, input_of
from lmstate.serve.wire.body import read, wrong
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.schema.responses import (
    ITEM_FORMS,
    CallOutputItem,
    CompactionItem,
    CustomCallItem,
    FunctionCallItem,
    ItemHead,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ShellCallItem,
)

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


def read_input(
    given: str | list[dict[str, Any]] | None, goes_on: bool, find: Find
) -> tuple[list[Message], list[dict[str, Any]]]:
    """(the messages of `input`, its items as the client may list them later). `goes_on`: something came before."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    elif not given and not (given is None and goes_on):
        raise wrong("input", "a string or an array of items", given)
    return read_items(given or [], "input", find)


def read_items(given: Sequence[dict[str, Any]], path: str, find: Find) -> tuple[list[Message], list[dict[str, Any]]]:
    """(the messages of an array of items, the items in full). `find` gives the item that one refers to by its id."""
    messages: list[Message] = []
    items = []
    for index, one in enumerate(given):
        where = f"{path}[{index}]"
        kind = kind_of(one, where, "item_reference" if one.get("role") is None else "message")
        if kind == "item_reference":
            id = read(one, ItemReference, where).id
            if (known := find(id)) is None:
                raise ApiError(f"{where} refers to {id[:100]!r}, which is not stored here (any more)", 404, where)
            one, kind = known, known["type"]
        if kind in ELSEWHERE:
            head = read({key: one[key] for key in ("id", "status") if key in one}, ItemHead, where)
        elif (form := ITEM_FORMS.get(kind)) is None:
            raise ApiError(f"{where} is of type {kind[:60]!r}, which is not served here", param=where)
        else:
            head = read(one, form, where)
            _add_item(head, where, messages)
        ours = head.id is not None and find(head.id) is not None  # else another client may name its own item alike
        items.append(_in_full(one, kind, head.id if ours else None))
    return messages, items


def _in_full(item: dict[str, Any], kind: str, id: str | None) -> dict[str, Any]:
    """An item with all that the protocol's types have, as it is listed; without an `id` it gets one."""
    shown = {**item, "type": kind, "id": id or new_id(PREFIXES.get(kind, "item_"))}
    if kind == "message":
        output = item.get("role") == "assistant"
        content = item.get("content")
        if isinstance(content, str):
            content = [{"type": "output_text" if output else "input_text", "text": content}]
        shown["content"] = [{"annotations": [], **part} if output else part for part in content or ()]
    if kind == "reasoning":
        return {"summary": [], **shown}
    return {**shown, "status": item.get("status") or "completed"}


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


def _add_item(item: ItemHead, path: str, messages: list[Message]) -> None:
    """Add an item. Reasoning, text and calls that follow each other are one message of the assistant."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    match item:
        case MessageItem():
            content, pictures = read_content(item.content, f"{path}.content", item.role)
            if item.role == "assistant" and last is not None and (last.calls or not last.content):
                messages[-1] = replace(last, content=last.content + content, pictures=(*last.pictures, *pictures))
            else:
                messages.append(Message(ROLES[item.role], content, pictures=pictures))
        case ReasoningItem():
            text, _ = read_content(item.content, f"{path}.content")
            summary, _ = read_content(item.summary, f"{path}.summary")
            messages.append(Message("assistant", reasoning=text or summary))
        case FunctionCallItem() | CustomCallItem() | ShellCallItem():
            call = _call(item, path)
            if last is None:
                messages.append(Message("assistant", calls=(call,)))
            else:
                messages[-1] = replace(last, calls=(*last.calls, call))
        case CallOutputItem():
            id = item.call_id or (item.id if item.type == "local_shell_call_output" else None)
            if id is None:
                raise wrong(f"{path}.call_id", "a string", None)
            content, pictures = read_content(item.output, f"{path}.output", "tool")
            messages.append(Message("tool", content, call_id=id, pictures=pictures))
        case CompactionItem():
            messages.append(Message("user", summary_of(item.encrypted_content, f"{path}.encrypted_content")))


def _call(item: FunctionCallItem | CustomCallItem | ShellCallItem, path: str) -> Call:
    if isinstance(item, FunctionCallItem):
        return Call(item.call_id, full_name(item.namespace, item.name), item.arguments or "{}")
    if isinstance(item, CustomCallItem):
        return Call(item.call_id, item.name, arguments_of(item.input or ""))
    id = item.call_id or item.id
    if id is None:
        raise wrong(f"{path}.id", "a string", None)
    return Call(id, "local_shell", json.dumps(item.action or {}, ensure_ascii=False))


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
