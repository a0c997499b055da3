"""The contract of a tool-call format, and the parts that several formats share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lmstate.serve.tools.events import CallArguments, CallStart, Text, Tool
from lmstate.serve.tools.reader import SPACE, Parse, Reader, overlap
from lmstate.text.grammars.lark import json_term
from lmstate.text.grammars.schema_types import is_text, value_of

Literal = Callable[[str], str]  # a marker as a term of a Lark grammar: a special token, or a string


class ToolFormat(ABC):
    """A format in which models write tool calls in their text.

    `markers` are the special tokens that the format is told by: they must reach the parser, though other special tokens
    have no text.
    """

    name: ClassVar[str]
    channels: ClassVar[bool] = False  # whether text comes between markers too, which are read without tools as well
    markers: tuple[str, ...] = ()

    @abstractmethod
    def matches(self, template: str) -> bool:
        """Whether a chat template writes calls in this format."""

    @abstractmethod
    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        """A parser of answers: text, and calls as they come."""

    @abstractmethod
    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        """The grammar of calls."""

    def head(self, literal: Literal) -> str:
        """The term that this format writes before an answer that is not a call; empty for most."""
        return ""

    def framed(self, lark: str, literal: Literal) -> str:
        """A grammar after what this format may write before an answer and before calls."""
        return lark

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, names and their JSON arguments, as text, for a template that leaves out those of earlier answers."""
        objects = [f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls]
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)

    def call_id(self, id: str) -> str:
        """A call's id as this format's templates accept it."""
        return id


@dataclass(frozen=True)
class Rules:
    """A Lark grammar: `call` is the name of the rule of one call, `lines` define it.

    Calls are between `begin` and `end` and are parted by `between`, terms of Lark or empty. `trigger` is the marker
    that tells text from calls; where the whole answer is one or the other, `text` is the regular expression of text.
    """

    lines: tuple[str, ...]
    trigger: str
    begin: str = ""
    between: str = ""
    end: str = ""
    text: str = ""


def choice(name: str, tools: Sequence[Tool], term: Callable[[Tool], str]) -> str:
    """A rule that is one alternative a tool."""
    return f"{name}: " + " | ".join(term(tool) for tool in tools)


def arguments_term(tool: Tool) -> str:
    """The arguments of a tool's call, as a term of Lark."""
    return json_term(tool.schema, tool.strict)


def call_object(
    reader: Reader,
    arguments_keys: Sequence[str] = ("arguments", "parameters"),
    name_key: str = "name",
    named: str | None = None,
) -> Parse[bool]:
    """One `{"name": ..., "arguments": {...}}`, its arguments passed on as they come.

    named: the name, where it is known before the object.
    Returns False, with the text unread again, where it is not such an object: the caller shows it as text.
    """
    reader.record()
    name = named
    held: str | None = None  # the arguments
    if not (yield from reader.accept("{")):
        return False
    if name is not None:
        yield CallStart(name)
    while True:
        yield from reader.skip_space(",")
        if (yield from reader.accept("}")):
            break
        if not reader.text.startswith('"'):
            break
        key = as_json((yield from reader.json_value()))
        yield from reader.skip_space()
        if not (yield from reader.accept(":")):
            break
        yield from reader.skip_space()
        if key in arguments_keys and name is not None and held is None:
            held = yield from arguments(reader)
            continue
        value = yield from reader.json_value()
        if key in arguments_keys and held is None:
            held = value
        elif key == name_key and name is None and isinstance(text := as_json(value), str):
            yield CallStart(name := text)
            if held is not None:
                yield CallArguments(unwrapped(held))
    if name is None:
        reader.unread()
        return False
    if held is None:
        yield CallArguments("{}")
    return True


def arguments(reader: Reader) -> Parse[str]:
    """A JSON value passed on as arguments as it comes; an object written as a string is opened first."""
    yield from reader.at_least(1)
    if reader.text.startswith('"'):
        text = yield from reader.json_value()
        yield CallArguments(unwrapped(text))
        return text
    return (yield from reader.json_value(CallArguments))


def unwrapped(text: str) -> str:
    """JSON arguments, out of the string that some models put them in."""
    value = as_json(text)
    return value if isinstance(value, str) and isinstance(as_json(value), dict) else text


def as_json(text: str) -> Any:
    """The value of a JSON text; None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class ArgumentWriter:
    """Writes the arguments of formats that name each parameter by itself as one JSON object, piece by piece."""

    def __init__(self, tool: Tool | None) -> None:
        self._schema = tool.parameters if tool else {}
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._count = 0

    def is_text(self, key: str) -> bool:
        """Whether a parameter's value is a string whatever it says, so that its text can be passed on as it comes."""
        return is_text(self._properties.get(key), self._schema)

    def key(self, key: str) -> CallArguments:
        self._count += 1
        return CallArguments(("{" if self._count == 1 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")

    def value(self, key: str, text: str) -> CallArguments:
        """A whole value, of a type that the schema allows."""
        return CallArguments(json.dumps(value_of(text, self._properties.get(key), self._schema), ensure_ascii=False))

    def whole(self, value: Any) -> CallArguments:
        """A value that was put together."""
        return CallArguments(json.dumps(value, ensure_ascii=False))

    def end(self) -> CallArguments:
        return CallArguments("}" if self._count else "{}")


def stream_value(reader: Reader, writer: ArgumentWriter, key: str, end: str, strip: str = "") -> Parse[str | None]:
    """A parameter's value up to `end`. Text of a string parameter is passed on as it comes.

    `strip` is the text around the value (a line break at each side).
    """
    yield writer.key(key)
    if not writer.is_text(key):
        text, marker = yield from reader.collect((end,))
        yield writer.value(key, text.strip() if strip else text)
        return marker
    if strip:
        yield from reader.accept(strip)
    yield CallArguments('"')
    markers = (strip + end, end) if strip else (end,)
    marker = yield from reader.until(markers, lambda text: CallArguments(json.dumps(text, ensure_ascii=False)[1:-1]))
    yield CallArguments('"')
    return marker


def tool_named(tools: Sequence[Tool], name: str) -> Tool | None:
    return next((tool for tool in tools if tool.name == name), None)


def stray(reader: Reader, markers: Sequence[str], called: bool) -> Parse[str | None]:
    """Read up to the first of `markers`, and show text that is not a call: it may be all that the model said.

    called: whether a call came before it; then an answer that ends inside of a marker shows none of that.
    """
    text, found = yield from reader.collect(markers)
    if called and found is None:
        text = text[: len(text) - max(overlap(text, marker) for marker in markers)]
    if text.strip(SPACE + "]"):
        yield Text(text)
    return found


def plain_text(reader: Reader) -> Parse[None]:
    """Pass everything on as text."""
    yield from reader.until((), Text)
