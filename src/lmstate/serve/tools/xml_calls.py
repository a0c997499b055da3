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
    stray,
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
    dots      the same with another outer tag (dots)
    dsml      the same with `<｜DSML｜` tags (DeepSeek V3.2; dsml_calls: V4)
    seed      as qwen_xml with another outer tag, and values beside their tags (Seed-OSS)
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
                found = yield from stray(reader, (self.function, self.end), True)
            while found == self.function:
                yield from self.call(reader, tools)
                found = yield from reader.until((self.function, self.end) if self.several else (self.end,), None)
            yield from reader.skip_space()

    def call(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        """One call, from its function's name to the end of the function's tag."""
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
            close = (
                f'" string="{"true" if takes_text(schema) else "false"}">'
                if self.begin.startswith("<｜DSML｜")
                else self.close
            )
            return quoted(self.parameter + key + close + newline)

        lines = list(parameter_rules(tools, opening, newline, lambda key: literal(self.parameter_end), "\n"))
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
    """`<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>`.

    glm      each part on a line of its own (GLM 4.5 and 4.6, Ling)
    glm_4_7  without line breaks (GLM 4.7 and 5)
    hy_v3    on lines, `<tool_sep>` after the name, and an outer `<tool_calls>`, with and without `:opensource` in tags
    hy_v4    as glm_4_7, with an outer tag, and `:opensource` in tags
    """

    name: str  # type: ignore[misc]
    hint: str
    line: str = "\n"  # between the parts of a call
    separator: str = ""  # after the name
    outer: bool = False
    suffix: str = ""  # of the names of tags

    @property
    def markers(self) -> tuple[str, ...]:  # type: ignore[override]
        names = (*(["tool_calls"] if self.outer else []), "tool_call", "arg_key", "arg_value")
        tags = tuple(f"<{slash}{name}{self.suffix}>" for name in names for slash in ("", "/"))
        return tags + ((self.separator,) if self.separator else ())

    def matches(self, template: str) -> bool:
        return self.hint in template

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        *outer, begin, end, key_begin, key_end, value_begin, value_end = self.markers[: 8 if self.outer else 6]
        separators = (self.separator,) if self.separator else ()
        while (found := (yield from reader.until((begin, *outer), Text))) is not None:
            if found == begin:
                head, found = yield from reader.collect((key_begin, end, *separators))
                if found in separators:
                    found = yield from reader.until((key_begin, end), None)
                name = head.strip()
                yield CallStart(name)
                writer = ArgumentWriter(tool_named(tools, name))
                while found == key_begin:
                    key, closed = yield from reader.collect((key_end,))
                    if closed is None or (yield from reader.until((value_begin,), None)) is None:
                        break
                    if (yield from stream_value(reader, writer, key.strip(), value_end)) is None:
                        break
                    found = yield from reader.until((key_begin, end), None)
                yield writer.end()
            yield from reader.skip_space()

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        *outer, begin, end, key_begin, key_end, value_begin, value_end = map(
            literal, self.markers[: 8 if self.outer else 6]
        )
        behind = f"{literal(self.separator)} " if self.separator else ""
        line = quoted(self.line)

        def opening(key: str, schema: dict[str, Any]) -> str:
            return f"{key_begin} {quoted(key)} {key_end} {line} {value_begin}"

        def term(tool: Tool) -> str:
            return f"{quoted(tool.name)} {behind}{line} values_{tools.index(tool)}"

        lines = parameter_rules(tools, opening, "", lambda key: value_end, self.line)
        call = f"call: {begin} object {end}"
        made = (*lines, choice("object", tools, term), call)
        if outer:
            return Rules(made, self.markers[0], f'{outer[0]} "\\n"', '"\\n"', f'"\\n" {outer[1]}')
        return Rules(made, self.markers[0], between=line)


def properties_of(schema: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """(the schema of each property of an object, the names of those that it must have)."""
    properties, required = schema.get("properties"), schema.get("required")
    known = properties if isinstance(properties, dict) else {}
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    return {key: {**shared, **one} if isinstance(one, dict) else {} for key, one in known.items()}, names


def takes_text(schema: dict[str, Any]) -> bool:
    """Whether a value may be any text: its schema allows strings, and does not allow everything."""
    types = types_of(schema)
    return "string" in types and types != TYPES


def parameter_rules(
    tools: Sequence[Tool],
    opening: Callable[[str, dict[str, Any]], str],
    newline: str,
    end: Callable[[str], str],
    after: str,
) -> Iterator[str]:
    """Lark rules `values_N`: the parameters of tool N in the order of its schema, those not required may be absent.

    `opening` is the term before a value, `newline` text and `end` the term that close it, `after` text that follows.
    """
    for number, tool in enumerate(tools):
        properties, required = properties_of(tool.parameters)
        parts = []
        for index, (key, schema) in enumerate(properties.items()):
            rule = f"value_{number}_{index}"
            yield value_rule(rule, schema, tool.strict, newline, end(key))
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
