"""Formats whose calls are JSON objects with a name and arguments, alone or in a list, between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmstate.serve.tools.base import (
    Literal,
    Rules,
    ToolFormat,
    arguments,
    arguments_term,
    as_json,
    call_object,
    choice,
    stray,
)
from lmstate.serve.tools.events import CallStart, Text, Tool
from lmstate.serve.tools.reader import Parse, Reader
from lmstate.text.grammars.lark import quoted


@dataclass(frozen=True)
class JsonCalls(ToolFormat):
    """`begin {"name": ..., "arguments": {...}} end`; with `listed`, `begin [{...}, {...}] end`.

    hermes is that of Hermes, Qwen 2.5 and 3 and SmolLM3; granite, phi, jamba (Hunyuan A13B too) and nemotron write
    lists. longcat puts no line break between two calls.
    """

    name: str  # type: ignore[misc]
    begin: str
    end: str
    listed: bool = False
    hints: tuple[str, ...] = ()  # texts of templates that write in this format; all must be there
    between: str = "\n"  # two calls that are not in a list

    @property
    def markers(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(marker for marker in (self.begin, self.end) if marker)

    def matches(self, template: str) -> bool:
        return all(hint in template for hint in self.hints or (self.begin,))

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        while (yield from reader.until((self.begin,), Text)) is not None:
            yield from reader.skip_space("[" if self.listed else "")
            called = False
            while (yield from call_object(reader)):
                called = True
                yield from reader.skip_space(",")
                if not self.listed:
                    break
            if self.end:
                if (yield from stray(reader, (self.end,), called)) is None:
                    return
                yield from reader.skip_space()
            else:
                yield from reader.accept("]")

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        def term(tool: Tool) -> str:
            head = '{"name": ' + quoted(tool.name) + ', "arguments": '
            return f'{quoted(head)} {arguments_term(tool)} "}}"'

        if self.listed:
            end = f'"]" {literal(self.end)}' if self.end else '"]"'
            return Rules((choice("call", tools, term),), self.begin, f'{literal(self.begin)} "["', '", "', end)
        lines = (choice("object", tools, term), f'call: {literal(self.begin)} "\\n" object "\\n" {literal(self.end)}')
        return Rules(lines, self.begin, between=quoted(self.between))


@dataclass(frozen=True)
class KeyedCalls(ToolFormat):
    """`<|tools_prefix|>[{NAME: {...}}, ...]<|tools_suffix|>`: Apertus."""

    name: str = "apertus"  # type: ignore[misc]
    markers: tuple[str, ...] = ("<|tools_prefix|>", "<|tools_suffix|>")

    def matches(self, template: str) -> bool:
        return self.markers[0] in template

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        begin, end = self.markers
        while (yield from reader.until((begin,), Text)) is not None:
            yield from reader.skip_space("[")
            called = False
            reader.record()
            while (yield from reader.accept("{")):
                yield from reader.skip_space()
                name = as_json((yield from reader.json_value()))
                yield from reader.skip_space(":")
                if not isinstance(name, str):
                    reader.unread()
                    break
                yield CallStart(name)
                called = True
                yield from arguments(reader)
                yield from reader.skip_space("},")
                reader.record()
            yield from stray(reader, (end,), called)
            yield from reader.skip_space()

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        begin, end = map(literal, self.markers)

        def term(tool: Tool) -> str:
            return f'{quoted("{" + quoted(tool.name) + ": ")} {arguments_term(tool)} "}}"'

        return Rules((choice("call", tools, term),), self.markers[0], f'{begin} "["', '", "', f'"]" {end}')
