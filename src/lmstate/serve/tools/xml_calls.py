"""Formats that write each parameter of a call by itself, in tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmstate.serve.tools.base import (
    ArgumentWriter,
    Literal,
    Rules,
    ToolFormat,
    choice,
    stream_value,
    tool_named,
)
from lmstate.serve.tools.events import CallStart, Text, Tool
from lmstate.serve.tools.reader import Parse, Reader
from lmstate.text.grammars.lark import json_term, quoted
from lmstate.text.grammars.schema_types import TYPES, types_of


@dataclass(frozen=True)
class TaggedCalls(ToolFormat):
    """Calls in an outer tag; in it, a tag that names the function; in that, a tag for each parameter.

    qwen_xml  `<tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> </function> </tool_call>` (Qwen)
    minimax   `<minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">VALUE</parameter> </invoke> ...`
    dsml      the same with `<｜DSML｜` tags (DeepSeek V3.2)
    """

    name: str  # type: ignore[misc]
    begin: str
    end: str
    function: str  # up to the name
    function_end: str
    parameter: str  # up to the key
    parameter_end: str
    close: str  # after a name or a key: `>` or `">`
    several: bool = False  # whether one outer tag holds several calls
    lines: bool = True  # whether a value is on lines of its own
    hints: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.begin, self.end, "｜DSML｜"

    def matches(self, template: str) -> bool:
        return all(hint in template for hint in self.hints)

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        # Models leave out the outer tag at times, so the inner one begins a call as well.
        while (found := (yield from reader.until((self.begin, self.function), Text))) is not None:
            if found == self.begin:
                found = yield from reader.until((self.function, self.end), None)
            while found == self.function:
                yield from self._call(reader, tools)
                found = yield from reader.until((self.function, self.end) if self.several else (self.end,), None)
            yield from reader.skip_space()

    def _call(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        head, _ = yield from reader.collect((">",))
        name = head.strip().rstrip('"')
        yield CallStart(name)
        writer = ArgumentWriter(tool_named(tools, name))
        while (yield from reader.until((self.parameter, self.function_end), None)) == self.parameter:
            head, closed = yield from reader.collect((">",))
            if closed is None:
                break
            key = head.strip().split('"')[0]
            strip = "\n" if self.lines else ""
            if (yield from stream_value(reader, writer, key, self.parameter_end, strip)) is None:
                break
        yield writer.end()

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        newline = "\n" if self.lines else ""

        def opening(key: str, schema: dict[str, Any]) -> str:
            close = f'" string="{"true" if takes_text(schema) else "false"}">' if self.name == "dsml" else self.close
            return quoted(self.parameter + key + close + newline)

        lines = list(parameter_rules(tools, opening, newline, literal(self.parameter_end), "\n"))
        heads = {tool.name: quoted(self.function + tool.name + self.close + "\n") for tool in tools}
        term = lambda tool: f"{heads[tool.name]} values_{tools.index(tool)} {quoted(self.function_end)}"  # noqa: E731
        if self.several:
            return Rules(
                (*lines, choice("call", tools, term)),
                self.begin,
                f'{literal(self.begin)} "\\n"',
                '"\\n"',
                f'"\\n" {literal(self.end)}',
            )
        call = f'call: {literal(self.begin)} "\\n" object "\\n" {literal(self.end)}'
        return Rules((*lines, choice("object", tools, term), call), self.begin, between='"\\n"')


@dataclass(frozen=True)
class PairedCalls(ToolFormat):
    """`<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>`: GLM 4.5 and later."""

    name: str = "glm"  # type: ignore[misc]
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def matches(self, template: str) -> bool:
        return "<arg_key>" in template

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        while (yield from reader.until(("<tool_call>",), Text)) is not None:
            head, found = yield from reader.collect(("<arg_key>", "</tool_call>"))
            name = head.strip()
            yield CallStart(name)
            writer = ArgumentWriter(tool_named(tools, name))
            while found == "<arg_key>":
                key, closed = yield from reader.collect(("</arg_key>",))
                if closed is None or (yield from reader.until(("<arg_value>",), None)) is None:
                    break
                if (yield from stream_value(reader, writer, key.strip(), "</arg_value>")) is None:
                    break
                found = yield from reader.until(("<arg_key>", "</tool_call>"), None)
            yield writer.end()
            yield from reader.skip_space()

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        def opening(key: str, schema: dict[str, Any]) -> str:
            return f'{literal("<arg_key>")} {quoted(key)} {literal("</arg_key>")} "\\n" {literal("<arg_value>")}'

        lines = parameter_rules(tools, opening, "", literal("</arg_value>"), "\n")
        object_ = choice("object", tools, lambda tool: f'{quoted(tool.name)} "\\n" values_{tools.index(tool)}')
        call = f"call: {literal('<tool_call>')} object {literal('</tool_call>')}"
        return Rules((*lines, object_, call), "<tool_call>", between='"\\n"')


def properties_of(tool: Tool) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """(the schema of each parameter, the names of those that a call must have)."""
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    known = properties if isinstance(properties, dict) else {}
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    shared = {word: tool.parameters[word] for word in ("$defs", "definitions") if word in tool.parameters}
    return {key: {**shared, **schema} if isinstance(schema, dict) else {} for key, schema in known.items()}, names


def takes_text(schema: dict[str, Any]) -> bool:
    """Whether a value may be any text: its schema allows strings, and does not allow everything."""
    types = types_of(schema)
    return "string" in types and types != TYPES


def parameter_rules(
    tools: Sequence[Tool], opening: Callable[[str, dict[str, Any]], str], newline: str, end: str, after: str
) -> Iterator[str]:
    """Lark rules `values_N`: the parameters of tool N in the order of its schema, those not required may be absent.

    `opening` is the term before a value, `newline` text and `end` the term that close it, `after` text that follows.
    """
    for number, tool in enumerate(tools):
        properties, required = properties_of(tool)
        parts = []
        for index, (key, schema) in enumerate(properties.items()):
            rule = f"value_{number}_{index}"
            yield value_rule(rule, schema, tool.strict, newline, end)
            one = f"{opening(key, schema)} {rule} {quoted(after)}"
            parts.append(one if key in required else f"({one})?")
        yield f"values_{number}: " + (" ".join(parts) or '""')


def value_rule(rule: str, schema: dict[str, Any], strict: bool, newline: str, end: str) -> str:
    """A value and the marker that ends it. Plain text runs up to the marker, whether that is a token or text."""
    closing = f"{quoted(newline)} {end}" if newline else end
    words = schema.get("enum")
    if takes_text(schema) and isinstance(words, list) and words:
        texts = [word if isinstance(word, str) else json.dumps(word) for word in words]
        return f"{rule}: ({' | '.join(map(quoted, texts))}) {closing}"
    if not takes_text(schema):
        return f"{rule}: {json_term(schema, strict)} {closing}"
    if end.startswith("<["):
        return f"{rule}: /(.|\\n)*/ {end}"
    return f"{rule}[suffix={quoted(newline + json.loads(end))}]: /(.|\\n)*/"
