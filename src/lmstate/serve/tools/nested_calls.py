"""MiniMax-M3's calls: tags behind a marker, named by parameters, one in the other as objects and lists are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmstate.serve.tools.base import ArgumentWriter, Literal, Rules, ToolFormat, choice, stream_value, tool_named
from lmstate.serve.tools.events import CallStart, Text, Tool
from lmstate.serve.tools.reader import Parse, Reader
from lmstate.serve.tools.xml_calls import properties_of, value_rule
from lmstate.text.grammars.lark import quoted
from lmstate.text.grammars.schema_types import target, types_of, value_of

MARK = "]<]minimax[>["  # in front of each tag
DEEPEST = 32  # tags in tags; what is deeper is taken as text


@dataclass(frozen=True)
class NestedCalls(ToolFormat):
    """`<tool_call> <invoke name="NAME"><KEY>VALUE</KEY>...</invoke> ... </tool_call>`, a marker before each `<`.

    Values of an object are tags with its keys, and those of a list are tags `item`.
    """

    name: str = "minimax_m3"  # type: ignore[misc]
    markers: tuple[str, ...] = (MARK, "<tool_call>", "</tool_call>")

    def matches(self, template: str) -> bool:
        return MARK in template

    def parse(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        # Models leave out the outer tag at times, so the inner one begins a call as well.
        invoke = f'{MARK}<invoke name="'
        outer = (f"{MARK}<tool_call>", f"{MARK}</tool_call>")
        while (found := (yield from reader.until((*outer, invoke), Text))) is not None:
            if found == invoke:
                yield from self._call(reader, tools)
            yield from reader.skip_space()

    def _call(self, reader: Reader, tools: Sequence[Tool]) -> Parse[None]:
        head, _ = yield from reader.collect((">",))
        tool = tool_named(tools, head.strip().rstrip('"'))
        yield CallStart(head.strip().rstrip('"'))
        writer = ArgumentWriter(tool)
        properties = properties_of(tool.parameters)[0] if tool else {}
        while (yield from reader.until((MARK,), None)) is not None:
            yield from reader.skip_space()
            tag, closed = yield from reader.collect((">",))
            if closed is None or not tag.startswith("<") or tag.startswith("</"):
                break
            key = tag[1:].strip()
            if writer.is_text(key):
                if (yield from stream_value(reader, writer, key, f"{MARK}</{key}>")) is None:
                    break
                continue
            yield writer.key(key)
            yield writer.whole((yield from self._value(reader, key, properties.get(key, {}), 0)))
        yield writer.end()

    def _value(self, reader: Reader, key: str, schema: Any, depth: int) -> Parse[Any]:
        """A value up to the end of its tag."""
        if depth == DEEPEST:
            text, _ = yield from reader.collect((f"{MARK}</{key}>",))
            return text
        root = schema if isinstance(schema, dict) else {}
        inside: list[tuple[str, Any]] = []
        while True:
            text, found = yield from reader.collect((MARK,))
            if found is not None:
                yield from reader.skip_space()
                tag, found = yield from reader.collect((">",))
            if found is None or not tag.startswith("<") or tag.startswith("</"):
                break
            name = tag[1:].strip()
            inside.append((name, (yield from self._value(reader, name, _child(root, name), depth + 1))))
        kinds = types_of(root)
        if inside or (not text.strip() and kinds <= {"object", "array"}):
            if kinds == {"array"} or (inside and "array" in kinds and all(name == "item" for name, _ in inside)):
                return [value for _, value in inside]
            return dict(inside)
        return value_of(text, root, root)

    def rules(self, tools: Sequence[Tool], literal: Literal) -> Rules:
        special = literal(MARK).startswith("<[")
        whole = not special and not literal("<tool_call>").startswith("<[")  # all is text

        def tag(text: str) -> str:
            """A tag after the marker, as terms of Lark."""
            return f"{literal(MARK)} {quoted(text)}" if special else quoted(MARK + text)

        def outer(text: str) -> str:
            return tag(text) if whole else f"{literal(MARK)} {literal(text)}"

        lines: list[str] = []
        for number, tool in enumerate(tools):
            lines += _values(f"values_{number}", tool.parameters, tool.strict, tag)

        def term(tool: Tool) -> str:
            begin = tag(f'<invoke name="{tool.name}">')
            return f"{begin} values_{tools.index(tool)} {tag('</invoke>')}"

        begin, end = f'{outer("<tool_call>")} "\\n"', f'"\\n" {outer("</tool_call>")}'
        trigger = f"{MARK}<tool_call>" if whole else MARK
        return Rules((*lines, choice("call", tools, term)), trigger, begin, '"\\n"', end)


def _values(rule: str, schema: dict[str, Any], strict: bool, tag: Literal) -> Iterator[str]:
    """Lark rules of the tags of an object's values, in the order of its schema; those not required may be absent."""
    properties, required = properties_of(schema)
    parts = []
    for index, (key, child) in enumerate(properties.items()):
        yield from _value(f"{rule}_{index}", key, child, strict, tag)
        one = f"{tag(f'<{key}>')} {rule}_{index}"
        parts.append(one if key in required else f"({one})?")
    yield f"{rule}: " + (" ".join(parts) or '""')


def _value(rule: str, key: str, schema: dict[str, Any], strict: bool, tag: Literal) -> Iterator[str]:
    """Lark rules of a value and the tag that ends it. An object or a list of which nothing is known is JSON."""
    end = tag(f"</{key}>")
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        yield from _values(f"{rule}_inside", schema, strict, tag)
        yield f"{rule}: {rule}_inside {end}"
    elif schema.get("type") == "array" and isinstance(schema.get("items"), dict):
        yield from _value(f"{rule}_item", "item", _child(schema, "item"), strict, tag)
        yield f"{rule}: ({tag('<item>')} {rule}_item)* {end}"
    else:
        yield value_rule(rule, schema, strict, "", end)


def _child(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """The schema of a value in one of this schema, or in one of its alternatives, by the name of its tag."""
    shared: dict[str, Any] = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    options = [schema, target(str(schema.get("$ref")), schema)]
    options += [one for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list) for one in schema[word]]
    for option in options:
        if not isinstance(option, dict):
            continue
        items = option.get("items")
        properties = {"item": items} if name == "item" and isinstance(items, dict) else option.get("properties")
        known = properties_of({**shared, "properties": properties})[0]
        if name in known:
            return known[name]
    return {}
