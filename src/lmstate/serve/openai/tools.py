"""The tools of OpenAI's protocols: functions and custom tools, and which of them an answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lmstate.serve.answer.service import ToolUse
from lmstate.serve.tools import Tool
from lmstate.serve.tools.custom import custom_tool
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.fields import Fields

TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
MOST_TOOLS = 512
KINDS = ("function", "custom")
NAMESPACE = "namespace"  # a kind of tool in responses: functions of one source, an MCP server say


def read_tool_use(body: Fields, *, wrapped: bool) -> ToolUse:
    """`tools`, `tool_choice` and `parallel_tool_calls`.

    `wrapped`: in the protocol a tool's fields stand in an object of its kind (`function: {...}`), as in chat, not
    beside its type, as in responses. Either form is taken in both.
    """
    tools = read_tools(body, wrapped)
    parallel = body.flag("parallel_tool_calls", True)
    choice = body.get("tool_choice")
    if choice is None or isinstance(choice, str):
        word = body.choice("tool_choice", ("auto", "none", "required"), "auto")
        if word == "required" and not tools:
            raise ApiError("tool_choice is required, and no tools are given", param="tool_choice")
        return ToolUse(tools, word or "auto", parallel=parallel)
    given = body.inner("tool_choice")
    assert given is not None
    kind = given.text("type")
    if kind == "allowed_tools":
        return _allowed_tools(given.inner("allowed_tools") or given, tools, parallel)
    if kind not in KINDS:
        raise given.wrong("type", f"one of {', '.join(KINDS)}, allowed_tools")
    name = chosen_name(_unwrapped(given, kind, wrapped), tools, given.text("namespace"))
    return ToolUse(tools, name, named=True, parallel=False)


def read_tools(body: Fields, wrapped: bool) -> tuple[Tool, ...]:
    """The functions and custom tools among the `tools`.

    Kinds of tools that run elsewhere are left out, since clients send them to every server.
    """
    tools: dict[str, Tool] = {}
    for given in body.items("tools", MOST_TOOLS):
        kind = given.text("type", "function")
        if kind == NAMESPACE and not wrapped:
            space = given.text("name")
            for inner in given.items("tools", MOST_TOOLS):
                if inner.text("type", "function") == "function":
                    _add_function(tools, inner, inner, space)
        elif kind == "custom":
            fields = _unwrapped(given, kind, wrapped)
            name = tool_name(fields, tools)
            tools[name] = custom_tool(fields, name)
        elif kind == "function":
            _add_function(tools, _unwrapped(given, kind, wrapped), given)
    return tuple(tools.values())


def _add_function(tools: dict[str, Tool], fields: Fields, given: Fields, space: str | None = None) -> None:
    name = tool_name(fields, tools, space)
    parameters = fields.inner("parameters")
    tools[name] = Tool(
        name,
        fields.text("description") or "",
        {} if parameters is None else parameters.values,
        fields.flag("strict") or given.flag("strict"),
        own=None if not space else (space, fields.need_text("name")),
        param=fields.name("parameters"),
    )


def full_name(space: str | None, name: str) -> str:
    """The name that the model knows a tool by."""
    return name if not space else f"{space.rstrip('_')}__{name}"


def _unwrapped(given: Fields, kind: str, wrapped: bool) -> Fields:
    """The fields of a tool, or of the choice of one."""
    inner = given.inner(kind)
    if inner is None and wrapped and not given.has("name"):
        raise given.wrong(kind, "an object with the tool's name")
    return given if inner is None else inner


def _allowed_tools(given: Fields, tools: tuple[Tool, ...], parallel: bool) -> ToolUse:
    names: set[Any] = set()
    for item in given.items("tools", MOST_TOOLS):
        inner = next((inner for kind in KINDS if (inner := item.inner(kind)) is not None), item)
        names.add(full_name(inner.text("namespace"), inner.need_text("name")))
    mode = given.choice("mode", ("auto", "required"), "auto")
    return ToolUse(tuple(tool for tool in tools if tool.name in names), mode or "auto", parallel=parallel)


def tool_name(given: Fields, others: dict[str, Tool], space: str | None = None) -> str:
    """The name of a tool. Raises `ApiError` for none, and for that of another one."""
    name = full_name(space, given.need_text("name"))
    if not TOOL_NAME.fullmatch(name):
        raise given.wrong("name", "up to 128 letters, digits and _ . : / -")
    if name in others:
        raise ApiError(f"{given.name('name')} is {name!r}, as that of another tool", param=given.name("name"))
    return name


def chosen_name(given: Fields, tools: Sequence[Tool], space: str | None = None) -> str:
    """The name in a `tool_choice`. Raises `ApiError` for one that no tool has."""
    name = full_name(space, given.need_text("name"))
    if name not in {tool.name for tool in tools}:
        where = given.name("name")
        raise ApiError(f"{where} is {name[:100]!r}, which is not among the tools", param=where)
    return name
