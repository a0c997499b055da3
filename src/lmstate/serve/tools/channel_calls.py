"""Formats whose answers come in channels: what is thought, what is said and what is called, each between markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lmstate.serve.tools.base import Literal, Rules, ToolFormat, arguments, arguments_term, call_object, choice, stray
from lmstate.serve.tools.events import CallArguments, CallStart, Reasoning, Text, Tool
from lmstate.serve.tools.reader import Parse, Reader
from lmstate.serve.tools.xml_calls import TaggedCalls, parameter_rules
from lmstate.text.grammars.lark import quoted


@dataclass(frozen=True)
class HarmonyCalls(ToolFormat):
    """gpt-oss's messages in channels: `analysis` is reasoning, `final` the answer, one `to=functions.NAME` a call."""

    channels: ClassVar[bool] = True
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

    channels: ClassVar[bool] = True
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

    channels: ClassVar[bool] = True
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


@dataclass(frozen=True)
class SolarCalls(ToolFormat):
    """Solar Open's messages: `<|think|>`, `<|content|>`, or `<|tool_calls|>` and calls; `<|end|>` ends those before.

    A call is `<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>`.
    """

    channels: ClassVar[bool] = True
    name: str = "solar"  # type: ignore[misc]
    markers: tuple[str, ...] = (
        "<|think|>",
        "<|content|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
        "<|tool_calls|>",
        "<|begin|>",
        "<|end|>",
    )

    def matches(self, template: str) -> bool:
        return "<|tool_call:begin|>" in template

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        thinking, text, call, named, args, call_end, *messages = self.markers
        found: str | None = ""
        while found is not None:
            role = found == "<|begin|>"
            header, found = yield from reader.collect(self.markers)
            if found in (thinking, text):
                found = yield from reader.until(messages, Reasoning if found == thinking else Text)
            elif found == call:
                id, found = yield from reader.collect((named, args, call_end, *messages))
                if found == named:
                    name, found = yield from reader.collect((args, call_end, *messages))
                    yield CallStart(name.strip(), id.strip() or None)
                    if found == args:
                        yield from reader.skip_space()
                        yield from arguments(reader)
                        found = yield from reader.until((call_end, *messages), None)
                    else:
                        yield CallArguments("{}")
                elif id.strip():
                    yield Text(id)
            elif header.strip() and not role:  # text without the marker in front of it
                yield Text(header)

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        _, _, call, named, args, end, *_ = map(literal, self.markers)

        def term(tool: Tool) -> str:
            return f"{call} /[a-z0-9]{{1,24}}/ {named} {quoted(tool.name)} {args} {arguments_term(tool)} {end}"

        text = r"/(.|\n)*/ & ~/(.|\n)*<\|(think|content|begin|end|tool_call[a-z:]*)\|>(.|\n)*/"
        return Rules((choice("call", tools, term),), self.markers[6], literal(self.markers[6]), text=text)

    def head(self, literal: Literal) -> str:
        return literal(self.markers[1])

    def framed(self, lark: str, literal: Literal) -> str:
        """The grammar where a thought may come first."""
        thinking, *_, begin, end = map(literal, self.markers)
        rules = "THOUGHT: /(.|\\n)*/\n" + lark.replace("start:", "framed:", 1)
        return f'start: ({thinking} THOUGHT {end} {begin} "assistant")? framed\n{rules}'


ATEM = TaggedCalls(
    "atem",
    "<atem:function_calls>",
    "</atem:function_calls>",
    '<atem:invoke name="',
    "</atem:invoke>",
    '<atem:parameter name="',
    "</atem:parameter>",
    '">',
    several=True,
    lines=False,
)


@dataclass(frozen=True)
class MuseCalls(ToolFormat):
    """Muse Glimmer's messages, each with a recipient: ` to=self` for reasoning, ` to=user`, or ` to=NAME` for a call.

    The call is in tags (`ATEM`). `<|eom|>` ends a message that another one follows.
    """

    channels: ClassVar[bool] = True
    name: str = "muse"  # type: ignore[misc]
    markers: tuple[str, ...] = (
        "<|start|>",
        "<|message|>",
        "<|eom|>",
        "<|eot|>",
        ATEM.begin,
        ATEM.end,
        "<atem:invoke",
        ATEM.function_end,
        "<atem:parameter",
        ATEM.parameter_end,
    )

    def matches(self, template: str) -> bool:
        return ATEM.begin in template

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        start, message, *ends = self.markers[:4]
        ends.append(start)
        found: str | None = ""
        while found is not None:
            role = found == start
            header, found = yield from reader.collect((message, *ends))
            _, _, recipient = header.rpartition("to=")
            if found != message:
                if header.strip() and not role:  # text without a header
                    yield Text(header)
            elif recipient.strip() in ("self", "user"):
                found = yield from reader.until(ends, Reasoning if recipient.strip() == "self" else Text)
            else:
                found = yield from self._calls(reader, tools, ends)

    def _calls(self, reader: Reader, tools: Sequence[Tool], ends: Sequence[str]) -> Parse[str | None]:
        marks = (ATEM.begin, ATEM.function, ATEM.end)
        while (found := (yield from reader.until((*marks, *ends), Text))) in marks:
            if found == ATEM.function:
                yield from ATEM.call(reader, tools)
            yield from reader.skip_space()
        return found

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        start, message, more, _, begin, end, invoke, invoke_end, parameter, parameter_end = map(literal, self.markers)

        def opening(key: str, schema: dict[str, Any]) -> str:
            return parameter + " " + quoted(f' name="{key}">')

        def term(tool: Tool) -> str:
            named = quoted(f' name="{tool.name}">\n')
            call = f"{invoke} {named} values_{tools.index(tool)} {invoke_end}"
            return f'{quoted(f" to={tool.name}")} {message} {begin} "\\n" {call} "\\n" {end}'

        lines = parameter_rules(tools, opening, "", lambda key: parameter_end, "\n")
        text = r"/(.|\n)*/ & ~/(.|\n)*(<\|(start|message|eom|eot)\|>|<\/?atem:)(.|\n)*/"
        between = f'{more} {start} "assistant"'
        return Rules((*lines, choice("call", tools, term)), self.markers[1], between=between, text=text)

    def head(self, literal: Literal) -> str:
        return f'" to=user" {literal(self.markers[1])}'

    def framed(self, lark: str, literal: Literal) -> str:
        """The grammar where thoughts may come first, each a message of its own."""
        start, message, more, *_ = map(literal, self.markers)
        thought = f'" to=self" {message} THOUGHT {more} {start} "assistant"'
        rules = "THOUGHT: /(.|\\n)*/\n" + lark.replace("start:", "framed:", 1)
        return f"start: ({thought})* framed\n{rules}"
