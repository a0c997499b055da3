"""Tools as OpenAI's protocols write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from lmstate.serve.wire.schema.common import JsonObject, ShortText

_TOOL: dict[str, Any] = {"properties": {"type": {"type": "string"}, "name": {"type": "string"}}}
# Each kind has fields of its own, and those of other servers are let through.
AnyTool = Annotated[dict[str, Any], Meta(extra_json_schema=_TOOL)]
AnyTools = Annotated[list[AnyTool], Meta(max_length=512)]


class FunctionFields(Struct, kw_only=True):
    """A function that an answer may call."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class GrammarFields(Struct, kw_only=True):
    """A grammar that a custom tool's input fits."""

    syntax: ShortText | None = None
    definition: str | None = None


class CustomFormat(GrammarFields, kw_only=True):
    """The same, as chat has it: with one more object around it."""

    grammar: GrammarFields | None = None


class CustomFields(Struct, kw_only=True):
    """A tool whose input is a text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class ToolHead(Struct, kw_only=True):
    """The kind of a tool, and its fields where they are in an object of their own."""

    type: str | None = None
    strict: bool | None = None
    function: FunctionFields | None = None
    custom: CustomFields | None = None


class Namespace(Struct, kw_only=True):
    """Functions of one source, an MCP server for example."""

    name: str | None = None
    tools: AnyTools | None = None


class ChosenTool(Struct, kw_only=True, omit_defaults=True):
    """The name of a tool that an answer must call."""

    name: str
    namespace: str | None = None


class AllowedTool(Struct, kw_only=True, omit_defaults=True):
    """One of the tools that an answer may call."""

    type: str | None = None
    name: str | None = None
    namespace: str | None = None
    function: ChosenTool | None = None
    custom: ChosenTool | None = None


class AllowedTools(Struct, kw_only=True, omit_defaults=True):
    """The tools that an answer may call."""

    tools: Annotated[list[AllowedTool], Meta(max_length=512)] | None = None
    mode: Literal["auto", "required"] | None = None


class ToolChoice(AllowedTools, kw_only=True, omit_defaults=True):
    """The tool that an answer must call, or those that it may call."""

    type: str | None = None
    name: str | None = None
    namespace: str | None = None
    function: ChosenTool | None = None
    custom: ChosenTool | None = None
    allowed_tools: AllowedTools | None = None
