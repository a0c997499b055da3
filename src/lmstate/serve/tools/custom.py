"""Custom tools of OpenAI's protocols, whose input is a text: the model calls them as functions of that one argument."""

from __future__ import annotations

import json
from typing import Any

from lmstate.serve.tools import Tool
from lmstate.serve.tools.base import as_json
from lmstate.serve.wire.fields import Fields

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_tool(given: Fields, name: str) -> Tool:
    """The tool as a function. A grammar that its input is to fit is told to the model, which is not held to it."""
    description = given.text("description") or ""
    format = given.inner("format")
    grammar = None if format is None else format.inner("grammar") or format  # chat has one more object around it
    if grammar is not None and (definition := grammar.text("definition")):
        syntax = grammar.text("syntax", most=40) or "this"
        description = f"{description}\n\nThe input has to fit this {syntax} grammar:\n{definition}".strip()
    return Tool(name, description, SCHEMA, custom=True, param=given.path)


def input_of(arguments: str) -> str:
    """The text in a call's arguments; arguments that were cut off, or are of another form, as they are."""
    values = as_json(arguments)
    text = values.get("input") if isinstance(values, dict) else None
    return text if isinstance(text, str) else arguments


def arguments_of(text: str) -> str:
    """The arguments of a call with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)
