"""Custom tools of OpenAI's protocols, whose input is a text: the model calls them as functions of that one argument."""

from __future__ import annotations

import json
from typing import Any

from lmstate.serve.tools import Tool
from lmstate.serve.tools.base import as_json
from lmstate.serve.wire.schema.tools import CustomFields

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_tool(given: CustomFields, name: str, path: str) -> Tool:
    """The tool as a function. A grammar that its input is to fit is told to the model, which is not held to it."""
    description = given.description or ""
    grammar = None if given.format is None else given.format.grammar or given.format
    if grammar is not None and grammar.definition:
        syntax = grammar.syntax or "this"
        description = f"{description}\n\nThe input has to fit this {syntax} grammar:\n{grammar.definition}".strip()
    return Tool(name, description, SCHEMA, custom=True, param=path)


def input_of(arguments: str) -> str:
    """The text in a call's arguments; arguments that were cut off, or are of another form, as they are."""
    values = as_json(arguments)
    text = values.get("input") if isinstance(values, dict) else None
    return text if isinstance(text, str) else arguments


def arguments_of(text: str) -> str:
    """The arguments of a call with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)
