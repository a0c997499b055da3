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

    hermes is that of Hermes, Qwen 2.5 and 3 and SmolLM3; granite, phi, functools (Phi-4-mini), jamba (Hunyuan A13B
    too), minimax_m1 and nemotron write lists. longcat puts no line break between two calls. internlm has a second
    marker and calls the arguments parameters. ernie has tags around an answer that is text.
    """

    name: str  # type: ignore[misc]
    begin: str
    end: str
    listed: bool = False
    hints: tuple[str, ...] = ()  # texts of templates that write in this format; all must be there
    between: str = "\n"  # two calls that are not in a list
    around: tuple[str, str] = ("\n", "\n")  # a call that is not in a list
    marks: tuple[str, str, str] = ("[", ", ", "]")  # of a list
    lead: str = ""  # a marker after `begin`
    key: str = "arguments"
    tags: tuple[str, ...] = ()  # around an answer that is text

    @property
    def markers(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(marker for marker in (self.begin, self.end, self.lead, *self.tags) if marker)

    def matches(self, template: str) -> bool:
        return all(hint in template for hint in self.hints or (self.begin,))

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        while (found := (yield from reader.until((self.begin, *self.tags), Text))) is not None:
            if found != self.begin:
                yield from reader.skip_space()
                continue
            yield from reader.skip_space()
            yield from reader.accept(self.lead)
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
            head = '{"name": ' + quoted(tool.name) + f', "{self.key}": '
            return f'{quoted(head)} {arguments_term(tool)} "}}"'

        begin, end, lead = (literal(marker) if marker else '""' for marker in (self.begin, self.end, self.lead))
        if self.listed:
            first, between, last = map(quoted, self.marks)
            call = choice("call", tools, term)
            return Rules((call,), self.begin, f"{begin} {first}", between, f"{last} {end}")
        before, after = map(quoted, self.around)
        lines = (choice("object", tools, term), f"call: {begin} {lead} {before} object {after} {end}")
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
