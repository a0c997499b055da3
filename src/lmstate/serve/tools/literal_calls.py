"""Formats that write a call as code: a name, and arguments in a notation of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmstate.serve.tools.base import (
    ArgumentWriter,
    Literal,
    Rules,
    ToolFormat,
    as_json,
    call_object,
    choice,
    stray,
    tool_named,
)
from lmstate.serve.tools.events import CallStart, Text, Tool
from lmstate.serve.tools.notation import Notation, argument_rules, parts, value
from lmstate.serve.tools.reader import Parse, Reader
from lmstate.text.grammars.lark import quoted

PYTHON = Notation(('"', "'"), True, ("True", "False", "None"), ", ", ": ", sorted=False)
JSON_WORDS = replace(PYTHON, words=("true", "false", "null"))


@dataclass(frozen=True)
class PythonCalls(ToolFormat):
    """`begin [NAME(key="text", other=3), ...] end`: LFM2, which may be told to write JSON.

    OLMo 3 writes each call on a line of its own, without brackets, and the words of JSON.
    """

    name: str  # type: ignore[misc]
    markers: tuple[str, ...]
    hints: tuple[str, ...] = ()  # texts of templates that write in this format; one is enough
    marks: tuple[str, str, str] = ("[", ", ", "]")  # of the list of calls
    notation: Notation = PYTHON

    def matches(self, template: str) -> bool:
        return any(hint in template for hint in self.hints)

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        begin, end = self.markers
        while (yield from reader.until((begin,), Text)) is not None:
            yield from reader.skip_space("[")
            called = False
            while True:
                yield from reader.skip_space(",")
                if reader.text.startswith("{"):
                    if (yield from call_object(reader)):
                        called = True
                        continue
                    found = None
                else:
                    name, found = yield from reader.collect(("(", "]", end))
                    if found == "(":
                        yield from self._call(reader, name.strip(), tools)
                        called = True
                        continue
                    if name.strip():
                        yield Text(name)
                break
            if found != end:
                yield from stray(reader, (end,), called)
            yield from reader.skip_space()

    def _call(self, reader: Reader, name: str, tools: Sequence[Tool]) -> Parse[None]:
        yield CallStart(name)
        tool = tool_named(tools, name)
        writer = ArgumentWriter(tool)
        in_order = iter(tool.parameters.get("properties") or ()) if tool else iter(())

        def argument() -> Parse[None]:
            key = ""
            if reader.text[0] not in "\"'[{-0123456789":  # it has a name
                key, found = yield from reader.collect(("=", ")"))
                if found != "=":
                    reader.text = (found or "") + reader.text
                    return
            key = key.strip() or next(in_order, "")
            yield writer.key(key)
            yield from value(reader, self.notation, writer.is_text(key))

        yield from parts(reader, ")", argument, between="")
        yield writer.end()

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        begin, end = self.markers
        first, between, last = self.marks
        written = between.join(f"{name}({self._keywords(arguments)})" for name, arguments in calls)
        return begin + first + written + last + end

    def _keywords(self, arguments: str) -> str:
        given = as_json(arguments)
        if not isinstance(given, dict):
            return arguments
        return ", ".join(f"{key}={self.notation.text(value)}" for key, value in given.items())

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        begin, end = map(literal, self.markers)
        first, between, last = map(quoted, self.marks)
        lines, names = argument_rules(tools, self.notation, literal, "=")
        calls = choice("call", tools, lambda tool: f'{quoted(tool.name + "(")} {names[tools.index(tool)]} ")"')
        return Rules((*lines, calls), self.markers[0], f"{begin} {first}", between, f"{last} {end}")


@dataclass(frozen=True)
class BracedCalls(ToolFormat):
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:3}<tool_call|>`: Gemma 4; FunctionGemma with other markers."""

    name: str  # type: ignore[misc]
    markers: tuple[str, ...]  # begin, end, and the quote of strings

    def matches(self, template: str) -> bool:
        return self.markers[0] in template

    @property
    def notation(self) -> Notation:
        return Notation(self.markers[2:], False, ("true", "false", "null"), ",", ":", sorted=True)

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        begin, end, quote = self.markers
        while (yield from reader.until((begin,), Text)) is not None:
            yield from reader.skip_space()
            yield from reader.accept("call:")
            name, found = yield from reader.collect(("{", end))
            if found == "{":
                yield from self._call(reader, name.strip(), quote, tools)
                yield from reader.until((end,), None)
            elif name.strip():
                yield Text(name)
            yield from reader.skip_space()

    def _call(self, reader: Reader, name: str, quote: str, tools: Sequence[Tool]) -> Parse[None]:
        yield CallStart(name)
        writer = ArgumentWriter(tool_named(tools, name))

        def argument() -> Parse[None]:
            key, found = yield from reader.collect((":", "}"))
            if found != ":":
                reader.text = (found or "") + reader.text
                return
            key = key.strip().replace(quote, "")
            yield writer.key(key)
            yield from value(reader, self.notation, writer.is_text(key))

        yield from parts(reader, "}", argument, between="")
        yield writer.end()

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        begin, end, _ = self.markers
        return "".join(f"{begin}call:{name}{self._braced(arguments)}{end}" for name, arguments in calls)

    def _braced(self, arguments: str) -> str:
        given = as_json(arguments)
        return self.notation.text(given) if isinstance(given, dict) else "{" + arguments + "}"

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        begin, end = map(literal, self.markers[:2])
        lines, names = argument_rules(tools, self.notation, literal, ":")
        objects = choice("object", tools, lambda tool: f'{quoted(tool.name + "{")} {names[tools.index(tool)]} "}}"')
        return Rules((*lines, objects, f'call: {begin} "call:" object {end}'), self.markers[0])
