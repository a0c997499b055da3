"""Values as formats write them that use no JSON: read as they come, and the grammar of those that fit a schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmstate.serve.tools.base import Literal
from lmstate.serve.tools.events import CallArguments, Tool
from lmstate.serve.tools.reader import Parse, Reader
from lmstate.text.grammars.lark import json_term, quoted
from lmstate.text.grammars.schema_types import TYPES, target, types_of

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_TERM, INTEGER_TERM = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/", "/-?(0|[1-9][0-9]*)/"
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{char: char for char in "\\'\"/"}}
BOUNDS_OF_TEXT = ("pattern", "minLength", "maxLength", "format")
DIGITS = {"x": 2, "u": 4, "U": 8}  # of a character's number, by the letter of its escape
ANY: dict[str, Any] = {}
DEEPEST = 64  # values in values; what is deeper is taken as text


@dataclass(frozen=True)
class Notation:
    """A way to write strings, words and the parts of lists and objects."""

    quotes: tuple[str, ...]
    escapes: bool  # whether a backslash in a string begins an escape, and keys are strings
    words: tuple[str, str, str]  # true, false, null
    comma: str
    colon: str
    sorted: bool  # whether the keys of an object come in alphabetical order

    def text(self, value: Any) -> str:
        """A value of JSON in this notation."""
        if isinstance(value, str):
            return json.dumps(value, ensure_ascii=False) if self.escapes else self.quotes[0] + value + self.quotes[0]
        if value is None or isinstance(value, bool):
            return self.words[2] if value is None else self.words[not value]
        if isinstance(value, list):
            return "[" + self.comma.join(map(self.text, value)) + "]"
        if isinstance(value, dict):
            pairs = [f"{self.key(key)}{self.colon}{self.text(value[key])}" for key in self.order(value)]
            return "{" + self.comma.join(pairs) + "}"
        return json.dumps(value)

    def key(self, key: str) -> str:
        return json.dumps(key, ensure_ascii=False) if self.escapes else key

    def order(self, keys: Any) -> list[str]:
        return sorted(keys, key=str.lower) if self.sorted else list(keys)


def bare(text: str, is_text: bool) -> CallArguments:
    """A text without quotes, as JSON: a word, a number, or else a string, as all is for a parameter of text."""
    word = text.strip()
    if is_text:
        return CallArguments(json.dumps(word, ensure_ascii=False))
    if word in WORDS or NUMBER.fullmatch(word):
        return CallArguments(WORDS.get(word, word))
    value: Any = word
    for kind in (int, float) if word.isascii() else ():
        try:
            value = kind(word)
            break
        except ValueError:
            continue
    return CallArguments(json.dumps(value if math.isfinite(value) else word) if value is not word else json.dumps(word))


def value(reader: Reader, notation: Notation, is_text: bool = False, depth: int = 0) -> Parse[None]:
    """Pass one value on as JSON as it comes, up to what follows it."""
    yield from reader.skip_space()
    for quote in notation.quotes:
        if (yield from reader.accept(quote)):
            yield from string(reader, notation, quote)
            return
    if depth < DEEPEST and (yield from reader.accept("[")):
        yield CallArguments("[")
        yield from parts(reader, "]", lambda: value(reader, notation, depth=depth + 1))
        yield CallArguments("]")
    elif depth < DEEPEST and (yield from reader.accept("{")):
        yield CallArguments("{")
        yield from parts(reader, "}", lambda: _pair(reader, notation, depth))
        yield CallArguments("}")
    else:
        text, mark = yield from reader.collect((",", "]", "}", ")") if notation.escapes else (",", "]", "}"))
        reader.text = (mark or "") + reader.text
        yield bare(text, is_text)


def parts(reader: Reader, end: str, one: Callable[[], Parse[None]], between: str = ", ") -> Parse[None]:
    """Values up to `end`, which is read too. A mark that ends something else ends them as well."""
    count = 0
    while True:
        yield from reader.skip_space(",")
        if (yield from reader.accept(end)) or not reader.text or reader.text[0] in ")]}":
            return
        if count and between:
            yield CallArguments(between)
        count += 1
        yield from one()


def _pair(reader: Reader, notation: Notation, depth: int) -> Parse[None]:
    for quote in notation.quotes:
        if (yield from reader.accept(quote)):
            yield from string(reader, notation, quote)
            yield from reader.skip_space()
            yield from reader.accept(":")
            break
    else:
        key, _ = yield from reader.collect((":",))
        yield CallArguments(json.dumps(key.strip(), ensure_ascii=False))
    yield CallArguments(": ")
    yield from value(reader, notation, depth=depth + 1)


def string(reader: Reader, notation: Notation, quote: str) -> Parse[None]:
    """Pass the text up to `quote` on as a string of JSON."""

    def escaped(text: str) -> CallArguments:
        return CallArguments(json.dumps(text, ensure_ascii=False)[1:-1])

    yield CallArguments('"')
    markers = (quote, "\\") if notation.escapes else (quote,)
    while (yield from reader.until(markers, escaped)) == "\\":
        yield from reader.at_least(1)
        char = reader.take(1)
        if (count := DIGITS.get(char)) is not None:
            yield from reader.at_least(count)
            digits = reader.text[:count]
            if re.fullmatch(f"[0-9a-fA-F]{{{count}}}", digits) and (code := int(digits, 16)) < 0x110000:
                reader.take(count)
                yield CallArguments(f"\\u{code:04x}" if code < 0x10000 else json.dumps(chr(code))[1:-1])
                continue
        if char:
            yield escaped(ESCAPES.get(char, "\\" + char))
    yield CallArguments('"')


@dataclass
class SchemaRules:
    """Lark rules for values in a notation that fit the schemas of one tool; `prefix` names them."""

    notation: Notation
    literal: Literal
    prefix: str
    root: Any
    strict: bool
    lines: list[str] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)  # of the rule of a schema, by its identity

    def value(self, schema: Any) -> str:
        """The name of the rule of values that fit a schema. Schemas may hold themselves by `$ref`."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            schema = target(schema["$ref"], self.root)
        if not isinstance(schema, dict):
            schema = ANY
        if (known := self._names.get(id(schema))) is not None:
            return known
        name = self._names[id(schema)] = f"{self.prefix}_{len(self._names)}"
        self.lines.append(f"{name}: " + " | ".join(self._options(schema, name)))
        return name

    def members(self, name: str, terms: Sequence[tuple[str, bool]]) -> str:
        """The name of a rule of terms, commas between them; True where one is required."""
        comma, rest = quoted(self.notation.comma), '""'
        first = '""'
        for index in reversed(range(len(terms))):
            term, required = terms[index]
            follow = f"{name}_after_{index}"
            start = f"{name}_from_{index}"
            self.lines.append(f"{start}: {term} {rest}" + ("" if required else f" | {first}"))
            self.lines.append(f"{follow}: {comma} {term} {rest}" + ("" if required else f" | {rest}"))
            first, rest = start, follow
        return first

    def properties(self, schema: dict[str, Any], name: str, opening: Callable[[str], str]) -> str:
        """The name of a rule of the pairs of an object: a key as `opening` writes it, and its value."""
        properties, required = schema.get("properties"), schema.get("required")
        known = properties if isinstance(properties, dict) else {}
        needed = required if isinstance(required, list) else []
        keys = self.notation.order(known)
        return self.members(name, [(f"{quoted(opening(key))} {self.value(known[key])}", key in needed) for key in keys])

    def _options(self, schema: dict[str, Any], name: str) -> Iterator[str]:
        words = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(words, list) and words:
            yield from (self._written(word) for word in words)
            return
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list) and schema[word]:
                yield from map(self.value, schema[word])
                return
        types = types_of(schema, self.root) or TYPES
        if "string" in types:
            yield self._string(schema)
        if "number" in types or "integer" in types:
            yield NUMBER_TERM if "number" in types else INTEGER_TERM
        if "boolean" in types:
            yield f"{quoted(self.notation.words[0])} | {quoted(self.notation.words[1])}"
        if "null" in types:
            yield quoted(self.notation.words[2])
        comma = quoted(self.notation.comma)
        if "array" in types:
            one = self.value(schema.get("items", ANY))
            yield f'"[" ({one} ({comma} {one})*)? "]"'
        if "object" in types:
            colon = self.notation.colon
            if isinstance(schema.get("properties"), dict):
                yield f'"{{" {self.properties(schema, name, lambda key: self.notation.key(key) + colon)} "}}"'
            else:
                key = json_term({"type": "string"}, True) if self.notation.escapes else r"/[A-Za-z_][A-Za-z0-9_.\-]*/"
                pair = f"{key} {quoted(colon)} {self.value(schema.get('additionalProperties', ANY))}"
                yield f'"{{" ({pair} ({comma} {pair})*)? "}}"'

    def _string(self, schema: dict[str, Any]) -> str:
        if self.notation.escapes:
            kept = {
                key: value for key, value in schema.items() if key in ("pattern", "minLength", "maxLength", "format")
            }
            return json_term({"type": "string", **kept}, self.strict)
        quote = self.literal(self.notation.quotes[0])
        if quote.startswith("<["):
            return rf"{quote} /(.|\n)*/ {quote}"
        rule = f"{self.prefix}_text"
        line = rf"{rule}[suffix={quote}]: /(.|\n)*/"
        if line not in self.lines:
            self.lines.append(line)
        return f"{quote} {rule}"

    def _written(self, word: Any) -> str:
        """One value as a term. Quotes may be special tokens, which no text has."""
        text = self.notation.text(word)
        quote = self.notation.quotes[0]
        if self.notation.escapes or quote not in text:
            return quoted(text)
        pieces = text.split(quote)
        return f" {self.literal(quote)} ".join(quoted(piece) for piece in pieces)


def argument_rules(
    tools: Sequence[Tool], notation: Notation, literal: Literal, equals: str
) -> tuple[list[str], list[str]]:
    """(Lark rules of arguments, the name of each tool's rule); `equals` is between a key and its value."""
    lines: list[str] = []
    names = []
    for index, tool in enumerate(tools):
        rules = SchemaRules(notation, literal, f"value_{index}", tool.parameters, tool.strict)
        names.append(rules.properties(tool.parameters, f"arguments_{index}", lambda key: key + equals))
        lines += rules.lines
    return lines, names
