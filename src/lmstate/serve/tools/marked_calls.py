"""Formats whose calls are between special tokens, the function's name apart from its JSON arguments."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmstate.serve.tools.base import Literal, Rules, ToolFormat, arguments, arguments_term, call_object, choice, stray
from lmstate.serve.tools.events import CallStart, Text, Tool
from lmstate.serve.tools.reader import Parse, Reader
from lmstate.text.grammars.lark import quoted

FENCE = "\n```json\n"


SPACE_OUTSIDE = re.compile(r'("(?:[^"\\]|\\.)*"?)|\s+')  # strings, which stay, or space


@dataclass(frozen=True)
class DeepSeekCalls(ToolFormat):
    """`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>`.

    V3 and R1 write `function` where V3.1 has the name, and then the name and the arguments in a fenced block.
    """

    name: str = "deepseek"  # type: ignore[misc]
    fenced: bool = False
    markers: tuple[str, ...] = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )

    def matches(self, template: str) -> bool:
        return "<｜tool▁sep｜>" in template and ("```json" in template) == self.fenced

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        section, begin, sep, end, section_end = self.markers
        while (yield from reader.until((section, begin), Text)) is not None:
            yield from reader.accept(begin)
            while True:
                name, found = yield from reader.collect((sep, end, section_end))
                if found == sep:
                    yield from self._call(reader, name.strip())
                    found = yield from reader.until((begin, section_end), None)
                elif name.strip():
                    yield Text(name)
                if found != begin:
                    break
            yield from reader.skip_space()

    def _call(self, reader: Reader, name: str) -> Parse[None]:
        if name == "function":  # the name comes on the next line, the arguments in a fence
            line, _ = yield from reader.collect(("\n",))
            name = line.strip() or name
            yield from reader.skip_space()
            yield from reader.accept("```json")
            yield from reader.skip_space()
        yield CallStart(name)
        yield from reader.skip_space()
        yield from arguments(reader)

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        section, begin, sep, end, section_end = self.markers

        def term(tool: Tool) -> str:
            if self.fenced:
                opening = f'{literal(begin)} "function" {literal(sep)} {quoted(tool.name + FENCE)}'
                return f'{opening} {arguments_term(tool)} "\\n```" {literal(end)}'
            return f"{literal(begin)} {quoted(tool.name)} {literal(sep)} {arguments_term(tool)} {literal(end)}"

        between = '"\\n"' if self.fenced else ""
        return Rules((choice("call", tools, term),), section, literal(section), between, literal(section_end))


@dataclass(frozen=True)
class KimiCalls(ToolFormat):
    """`<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

    name: str = "kimi"  # type: ignore[misc]
    markers: tuple[str, ...] = (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    )

    def matches(self, template: str) -> bool:
        return "<|tool_call_argument_begin|>" in template

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        section, begin, sep, _, section_end = self.markers
        while (found := (yield from reader.until((section, begin), Text))) is not None:
            if found == section:
                found = yield from stray(reader, (begin, section_end), True)
            while found == begin:
                id, found = yield from reader.collect((sep, section_end))
                if found != sep:
                    if id.strip():
                        yield Text(id)
                    break
                id = id.strip()
                yield CallStart(id.removeprefix("functions.").rsplit(":", 1)[0], id)
                yield from reader.skip_space()
                yield from arguments(reader)
                found = yield from reader.until((begin, section_end), None)
            yield from reader.skip_space()

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        section, begin, sep, end, section_end = self.markers

        def term(tool: Tool) -> str:
            opening = f"{literal(begin)} {quoted(f'functions.{tool.name}:')} /[0-9]+/ {literal(sep)}"
            return f"{opening} {arguments_term(tool)} {literal(end)}"

        return Rules((choice("call", tools, term),), section, literal(section), "", literal(section_end))


@dataclass(frozen=True)
class MistralCalls(ToolFormat):
    """`[TOOL_CALLS]NAME[ARGS]{...}`, once a call; before version 11 of their tokenizers `[TOOL_CALLS][{...}, ...]`."""

    name: str = "mistral"  # type: ignore[misc]
    listed: bool = False
    markers: tuple[str, ...] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def matches(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template and ("[ARGS]" not in template) == self.listed

    def call_id(self, id: str) -> str:
        """An id of nine letters and digits: Mistral's templates refuse others."""
        return id if len(id) == 9 and id.isalnum() else hashlib.blake2b(id.encode()).hexdigest()[:9]

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        begin, sep, id_mark = self.markers
        found = yield from reader.until((begin,), Text)
        while found is not None:
            yield from reader.skip_space()
            if (yield from reader.accept("[")) or reader.text.startswith("{"):  # no name begins like that
                yield from reader.skip_space()
                while (yield from call_object(reader)):
                    yield from reader.skip_space(",")
                yield from reader.accept("]")
            else:
                name, mark = yield from reader.collect((sep, id_mark, "{"))
                id = None
                if mark == id_mark:
                    id, mark = yield from reader.collect((sep, "{"))
                yield CallStart(name.strip(), id)
                if mark == "{":
                    reader.text = "{" + reader.text
                yield from reader.skip_space()
                yield from arguments(reader)
            found = yield from reader.until((begin,), Text)

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        begin, sep, _ = self.markers
        if self.listed:

            def term(tool: Tool) -> str:
                head = '{"name": ' + quoted(tool.name) + ', "arguments": '
                return f'{quoted(head)} {arguments_term(tool)} "}}"'

            return Rules((choice("call", tools, term),), begin, f'{literal(begin)} "["', '", "', '"]"')
        calls = choice(
            "call",
            tools,
            lambda tool: f"{literal(begin)} {quoted(tool.name)} {literal(sep)} {arguments_term(tool)}",
        )
        return Rules((calls,), begin)


@dataclass(frozen=True)
class LlamaCalls(ToolFormat):
    """The whole answer is `{"name": ..., "parameters": {...}}`: Llama 3.1 and later. Several are parted by `; `."""

    name: str = "llama"  # type: ignore[misc]
    markers: tuple[str, ...] = ("<|python_tag|>",)

    def matches(self, template: str) -> bool:
        return '"parameters": dictionary' in template or '{"name": function name, "parameters"' in template

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        yield from reader.skip_space()
        yield from reader.accept("<|python_tag|>")
        while True:
            yield from reader.at_least(1)
            names = [json.dumps(tool.name) for tool in tools]
            if not reader.text.startswith("{") or not (yield from self._is_call(reader, names)):
                break
            yield from call_object(reader)
            yield from reader.skip_space("; ")
        yield from reader.until((), Text)

    def _is_call(self, reader: Reader, names: Sequence[str]) -> Parse[bool]:
        """Whether the object names a tool first: an answer may be JSON that is not a call."""
        while True:
            text = SPACE_OUTSIDE.sub(r"\1", reader.text)
            heads = ['{"type":"function","name":' + name for name in names] + ['{"name":' + name for name in names]
            if any(text.startswith(head) for head in heads):
                return True
            if reader.closed or not any(head.startswith(text) for head in heads):
                return False
            yield None

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        def term(tool: Tool) -> str:
            head = '{"name": ' + quoted(tool.name) + ', "parameters": '
            return f'{quoted(head)} {arguments_term(tool)} "}}"'

        python = r"(<\|python_tag\|>\s*)?"
        names = "|".join(re.escape(json.dumps(tool.name)).replace("/", r"\/") for tool in tools)
        call = rf'\s*{python}\{{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*({names})(.|\n)*'
        text = rf"/(.|\n)*/ & ~/{call}/"
        return Rules((choice("call", tools, term),), '{"name": ', between='"; "', text=text)
