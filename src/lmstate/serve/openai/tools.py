"""The tools of OpenAI's protocols: functions and custom tools, and which of them an answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from lmstate.serve.answer.service import ToolUse
from lmstate.serve.tools import Tool
from lmstate.serve.tools.custom import custom_tool
from lmstate.serve.wire.body import read, wrong
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.schema.tools import (
    AllowedTools,
    CustomFields,
    FunctionFields,
    Namespace,
    ToolChoice,
    ToolHead,
)

TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
KINDS = ("function", "custom")
NAMESPACE = "namespace"  # a kind of tool in responses: functions of one source, an MCP server say


class ToolFields(Protocol):
    """The tools of a body, and which of them an answer calls."""

    tools: list[dict[str, Any]] | None
    tool_choice: str | ToolChoice | None
    parallel_tool_calls: bool | None


def read_tool_use(body: ToolFields, *, wrapped: bool) -> ToolUse:
    """`tools`, `tool_choice` and `parallel_tool_calls`.

    `wrapped`: in the protocol a tool's fields are in an object of its kind (`function: {...}`), as in chat, not
    beside its type, as in responses. Either form is taken in both.
    """
    tools = read_tools(body.tools or (), wrapped)
    parallel, choice = body.parallel_tool_calls is not False, body.tool_choice
    if choice is None or isinstance(choice, str):
        word = choice or "auto"
        if word not in ("auto", "none", "required"):
            raise wrong("tool_choice", "one of auto, none, required, or an object", word)
        if word == "required" and not tools:
            raise ApiError("tool_choice is required, and no tools are given", param="tool_choice")
        return ToolUse(tools, word, parallel=parallel)
    if choice.type == "allowed_tools":
        return _allowed_tools(choice.allowed_tools or choice, tools, parallel)
    if choice.type not in KINDS:
        raise wrong("tool_choice.type", f"one of {', '.join(KINDS)}, allowed_tools", choice.type)
    inner, path = (choice.function if choice.type == "function" else choice.custom), "tool_choice"
    if inner is not None or (wrapped and choice.name is None):
        path = f"tool_choice.{choice.type}"
    if path != "tool_choice" and inner is None:
        raise wrong(path, "an object with the tool's name", None)
    name = inner.name if inner is not None else choice.name
    return ToolUse(tools, chosen_name(name, f"{path}.name", tools, choice.namespace), named=True, parallel=False)


def read_tools(given: Sequence[dict[str, Any]], wrapped: bool) -> tuple[Tool, ...]:
    """The functions and custom tools among the `tools`.

    Kinds of tools that run elsewhere are left out, since clients send them to every server.
    """
    tools: dict[str, Tool] = {}
    for index, one in enumerate(given):
        path = f"tools[{index}]"
        kind = kind_of(one, path, "function")
        if kind == NAMESPACE and not wrapped:
            space = read(one, Namespace, path)
            for place, function in enumerate(space.tools or ()):
                where = f"{path}.tools[{place}]"
                if kind_of(function, where, "function") == "function":
                    _add_function(tools, read(function, FunctionFields, where), where, space=space.name)
        elif kind in KINDS:
            head = read(one, ToolHead, path)
            fields = head.function if kind == "function" else head.custom
            if fields is not None:
                path = f"{path}.{kind}"
            elif wrapped and one.get("name") is None:
                raise wrong(f"{path}.{kind}", "an object with the tool's name", None)
            else:
                fields = read(one, FunctionFields, path) if kind == "function" else read(one, CustomFields, path)
            if isinstance(fields, CustomFields):
                name = tool_name(fields.name, path, tools)
                tools[name] = custom_tool(fields, name, path)
            else:
                _add_function(tools, fields, path, bool(head.strict))
    return tuple(tools.values())


def kind_of(given: dict[str, Any], path: str, default: str) -> str:
    """The `type` of an object that is read by its kind."""
    kind = given.get("type")
    if kind is not None and not isinstance(kind, str):
        raise wrong(f"{path}.type", "a string", kind)
    return kind or default


def _add_function(
    tools: dict[str, Tool], given: FunctionFields, path: str, strict: bool = False, space: str | None = None
) -> None:
    name = tool_name(given.name, path, tools, space)
    tools[name] = Tool(
        name,
        given.description or "",
        given.parameters or {},
        bool(given.strict) or strict,
        own=None if not space else (space, given.name),
        param=f"{path}.parameters",
    )


def full_name(space: str | None, name: str) -> str:
    """The name that the model knows a tool by."""
    return name if not space else f"{space.rstrip('_')}__{name}"


def _allowed_tools(given: AllowedTools, tools: tuple[Tool, ...], parallel: bool) -> ToolUse:
    names = set()
    for index, one in enumerate(given.tools or ()):
        inner = one.function or one.custom or one
        if inner.name is None:
            raise wrong(f"tool_choice.tools[{index}].name", "a string", None)
        names.add(full_name(inner.namespace, inner.name))
    return ToolUse(tools, given.mode or "auto", parallel=parallel, only=frozenset(names))


def tool_name(given: str, path: str, others: dict[str, Tool], space: str | None = None) -> str:
    """The name of the tool at `path`. Raises `ApiError` for a wrong one, and for that of another tool."""
    name, path = full_name(space, given), f"{path}.name"
    if not TOOL_NAME.fullmatch(name):
        raise wrong(path, "up to 128 letters, digits and _ . : / -", given)
    if name in others:
        raise ApiError(f"{path} is {name!r}, as that of another tool", param=path)
    return name


def chosen_name(given: str | None, path: str, tools: Sequence[Tool], space: str | None = None) -> str:
    """The name in a `tool_choice`. Raises `ApiError` for one that no tool has."""
    if given is None:
        raise wrong(path, "a string", None)
    name = full_name(space, given)
    if name not in {tool.name for tool in tools}:
        raise ApiError(f"{path} is {name[:100]!r}, which is not among the tools", param=path)
    return name
