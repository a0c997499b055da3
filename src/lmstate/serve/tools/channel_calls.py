"""Formats whose answers come in channels: what is thought, what is said and what is called, each between markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmstate.serve.tools.base import Literal, Rules, ToolFormat, arguments, arguments_term, call_object, choice, stray
from lmstate.serve.tools.events import CallStart, Reasoning, Text, Tool
from lmstate.serve.tools.reader import Parse, Reader
from lmstate.text.grammars.lark import quoted


@dataclass(frozen=True)
class HarmonyCalls(ToolFormat):
    """gpt-oss's messages in channels: `analysis` is reasoning, `final` the answer, one `to=functions.NAME` a call."""

    name: str = "harmony"  # type: ignore[misc]
    markers: tuple[str, ...] = (
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    )

    def matches(self, template: str) -> bool:
        return "<|channel|>" in template and "<|message|>" in template

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        while True:
            header, found = yield from reader.collect(("<|message|>",))
            if found is None:
                if header.strip() and "<|" not in header:
                    yield Text(header)
                return
            if "to=functions." in header:
                name = header.split("to=functions.", 1)[1].split("<|", 1)[0].split()[0:1]
                yield CallStart(name[0] if name else "")
                yield from reader.skip_space()
                yield from arguments(reader)
                yield from reader.until(ends, None)
            else:
                event = Text if "final" in header.split("<|channel|>")[-1] else Reasoning
                yield from reader.until(ends, event)

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        channel, message = literal("<|channel|>"), literal("<|message|>")

        def term(tool: Tool) -> str:
            to = quoted(f"commentary to=functions.{tool.name} ")
            return f'{channel} {to} {literal("<|constrain|>")} "json" {message} {arguments_term(tool)}'

        between = f'{literal("<|end|>")} {literal("<|start|>")} "assistant"'
        text = r"/(.|\n)*/ & ~/(.|\n)*<\|(start|channel|message|end|call|return)\|>(.|\n)*/"
        return Rules((choice("call", tools, term),), "<|channel|>", between=between, text=text)

    def head(self, literal: Literal) -> str:
        return f'{literal("<|channel|>")} "final" {literal("<|message|>")}'

    def framed(self, lark: str, literal: Literal) -> str:
        """The grammar with harmony's channels around it: reasoning may come first, in a channel of its own."""
        channel, message = literal("<|channel|>"), literal("<|message|>")
        analysis = f'{channel} "analysis" {message} ANALYSIS {literal("<|end|>")} {literal("<|start|>")} "assistant"'
        rules = "ANALYSIS: /(.|\\n)*/\n" + lark.replace("start:", "framed:", 1)
        return f"start: ({analysis})? framed\n{rules}"


@dataclass(frozen=True)
class InklingCalls(ToolFormat):
    """Inkling's messages, each of one kind: `<|content_thinking|>`, `<|content_text|>`, or a call.

    A call is `NAME<|content_invoke_tool_json|>{"name":"NAME","args":{...}}<|end_message|>`; the name in front may be
    left out. `<|message_model|>` parts two messages.
    """

    name: str = "inkling"  # type: ignore[misc]
    markers: tuple[str, ...] = (
        "<|message_model|>",
        "<|content_thinking|>",
        "<|content_text|>",
        "<|content_invoke_tool_json|>",
        "<|end_message|>",
        "<|content_model_end_sampling|>",
    )

    def matches(self, template: str) -> bool:
        return "<|content_invoke_tool_json|>" in template

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        message, thinking, text, call, *ends = self.markers
        while True:
            header, found = yield from reader.collect(self.markers)
            if found in (thinking, text):
                found = yield from reader.until((message, *ends), Reasoning if found == thinking else Text)
            elif found == call:
                yield from reader.skip_space()
                keys = ("args", "arguments", "parameters")
                called = yield from call_object(reader, keys, named=header.strip() or None)
                found = yield from reader.until((message, *ends), None if called else Text)
            elif header.strip():  # text without the marker in front of it
                yield Text(header)
            if found is None:
                return

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        message, _, _, call, end, _ = map(literal, self.markers)

        def term(tool: Tool) -> str:
            head = '{"name":' + quoted(tool.name) + ',"args":'
            return f'{quoted(tool.name)} {call} {quoted(head)} {arguments_term(tool)} "}}" {end}'

        text = r"/(.|\n)*/ & ~/(.|\n)*<\|(message_model|content_[a-z_]+|end_message)\|>(.|\n)*/"
        return Rules((choice("call", tools, term),), self.markers[3], between=message, text=text)

    def head(self, literal: Literal) -> str:
        return literal("<|content_text|>")

    def framed(self, lark: str, literal: Literal) -> str:
        """The grammar where a thought may come first, and the end of the message last."""
        message, thinking, _, _, end, _ = map(literal, self.markers)
        rules = "THOUGHT: /(.|\\n)*/\n" + lark.replace("start:", "framed:", 1)
        return f"start: ({thinking} THOUGHT {end} {message})? framed {end}?\n{rules}"


@dataclass(frozen=True)
class CohereCalls(ToolFormat):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>`, or a text.

    The text is between `<|START_RESPONSE|>` and its end (Command R7B), or `<|START_TEXT|>` (Command A with reasoning).
    """

    name: str  # type: ignore[misc]
    channel: str  # of text

    @property
    def markers(self) -> tuple[str, ...]:  # type: ignore[override]
        return "<|START_ACTION|>", "<|END_ACTION|>", f"<|START_{self.channel}|>", f"<|END_{self.channel}|>"

    def matches(self, template: str) -> bool:
        return self.markers[0] in template and self.markers[2] in template

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        begin, end, *of_text = self.markers
        while (found := (yield from reader.until((begin, *of_text), Text))) is not None:
            if found == begin:
                yield from reader.skip_space("[")
                called = False
                while (yield from call_object(reader, name_key="tool_name")):
                    called = True
                    yield from reader.skip_space(",")
                yield from stray(reader, (end,), called)
            yield from reader.skip_space()

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        begin, end, *_ = map(literal, self.markers)
        id = quoted('    {"tool_call_id": "') + " /[0-9]+/ "

        def term(tool: Tool) -> str:
            head = '", "tool_name": ' + quoted(tool.name) + ', "parameters": '
            return f'{id} {quoted(head)} {arguments_term(tool)} "}}"'

        text = r"/(.|\n)*/ & ~/(.|\n)*<\|(START|END)_[A-Z]+\|>(.|\n)*/"
        return Rules(
            (choice("call", tools, term),), self.markers[0], f'{begin} "[\\n"', '",\\n"', f'"\\n]" {end}', text
        )

    def head(self, literal: Literal) -> str:
        return literal(self.markers[2])

    def framed(self, lark: str, literal: Literal) -> str:
        """The grammar with the marker that may end a text."""
        return f"start: framed {literal(self.markers[3])}?\n" + lark.replace("start:", "framed:", 1)
