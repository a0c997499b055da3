"""Formats that write a call as code: a name, and arguments in a notation of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class PythonCalls(ToolFormat):
    """`<|tool_call_start|>[NAME(key="text", other=3), ...]<|tool_call_end|>`: LFM2, which may be told to write JSON."""

    name: str = "lfm2"  # type: ignore[misc]
    markers: tuple[str, ...] = ("<|tool_call_start|>", "<|tool_call_end|>")

    def matches(self, template: str) -> bool:
        return "<|tool_call_start|>" in template or "<|tool_list_start|>" in template

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
            yield from value(reader, PYTHON, writer.is_text(key))

        yield from parts(reader, ")", argument, between="")
        yield writer.end()

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        begin, end = self.markers
        return begin + "[" + ", ".join(f"{name}({_keywords(arguments)})" for name, arguments in calls) + "]" + end

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        begin, end = map(literal, self.markers)
        lines, names = argument_rules(tools, PYTHON, literal, "=")
        calls = choice("call", tools, lambda tool: f'{quoted(tool.name + "(")} {names[tools.index(tool)]} ")"')
        return Rules((*lines, calls), self.markers[0], f'{begin} "["', '", "', f'"]" {end}')


def _keywords(arguments: str) -> str:
    given = as_json(arguments)
    if not isinstance(given, dict):
        return arguments
    return ", ".join(f"{key}={PYTHON.text(value)}" for key, value in given.items())


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
