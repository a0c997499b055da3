"""Bounds of JSON schemas and patterns, checked before a compiler sees them: what a few bytes may multiply to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lmstate.errors import GrammarError
from lmstate.text.grammars.schema_types import BOUNDS, is_too_large, target

MAX_SCHEMA_DEPTH = 60
MAX_ALTERNATIVES = 4096  # of a schema as one list of alternatives: `allOf` multiplies what `anyOf` adds
MAX_REPEATS = 200_000  # of the atoms of a pattern, with nested counts multiplied
QUANTIFIER = re.compile(r"\{(\d{0,9})(,?)(\d{0,9})\}")


def check_schema(schema: Any, param: str, strict: bool = True) -> None:
    """A JSON schema of reasonable size, whose integers a mask can follow. Raises `GrammarError`.

    strict: bounds of numbers are followed too; else those that cannot be are left out of the mask.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"{param} must be a JSON schema, an object", param)
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            break
    else:
        raise GrammarError(f"{param} is a schema nested more than {MAX_SCHEMA_DEPTH} deep", param)
    counter = _Alternatives(schema)
    for part in _nodes(schema):
        if counter.of(part) > MAX_ALTERNATIVES:
            raise GrammarError(
                f"{param} has a schema of more than {MAX_ALTERNATIVES} alternatives, with those of allOf multiplied: "
                "use fewer of them",
                param,
            )
        for pattern in _patterns(part):
            check_pattern(pattern, param)
        for word in ("const", "enum", *(BOUNDS if strict else ())):
            if word in part and (large := next(filter(is_too_large, _values(part[word])), None)) is not None:
                raise GrammarError(
                    f"{param} has a schema with {word} {large}: integers beyond 2**53 cannot be told apart by the "
                    "mask; use a string, or a smaller number",
                    param,
                )


def check_pattern(pattern: str, param: str) -> None:
    """A regular expression whose counts do not multiply to more than is compiled. Raises `GrammarError`."""
    if repeats(pattern) > MAX_REPEATS:
        raise GrammarError(
            f"{param} has a pattern of more than {MAX_REPEATS} characters with its counts multiplied: use smaller ones",
            param,
        )


def repeats(pattern: str) -> int:
    """About how many atoms a pattern has, once its counts are written out."""
    stack, whole, last, at = [], 0, 0, 0
    while at < len(pattern):
        letter = pattern[at]
        count = 1
        if letter == "(":
            stack.append((whole, last))
            whole = last = 0
        elif letter == ")" and stack:
            inner = whole
            whole, last = stack.pop()
            whole, last = whole + inner, inner
        elif letter == "{" and (found := QUANTIFIER.match(pattern, at)):
            count = max(int(found[1] or 0), int(found[3] or 0), 1)
            whole, last = whole + last * (count - 1), last * count
            at = found.end() - 1
        elif letter not in "*+?|^$":
            if letter == "[":
                close = pattern.find("]", at + 2)
                at = close if close > 0 else at
            whole, last = whole + 1, 1
            at += letter == "\\"
        at += 1
    return sum(before for before, _ in stack) + whole


class _Alternatives:
    """Counts the alternatives of the parts of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def of(self, schema: Any) -> int:
        """At most `MAX_ALTERNATIVES` + 1. A reference to a schema that is being counted counts as one."""
        if not isinstance(schema, dict):
            return 1
        if (known := self._known.get(id(schema))) is not None:
            return known
        self._known[id(schema)] = 1
        count = 1
        for key in ("anyOf", "oneOf"):
            if isinstance(given := schema.get(key), list):
                count *= max(sum(map(self.of, given)), 1)
        for one in [*(given if isinstance(given := schema.get("allOf"), list) else []), self._referred(schema)]:
            count = min(count * self.of(one), MAX_ALTERNATIVES + 1)
        self._known[id(schema)] = min(count, MAX_ALTERNATIVES + 1)
        return self._known[id(schema)]

    def _referred(self, schema: dict[str, Any]) -> Any:
        """The schema that a `$ref` within the document names."""
        name = schema.get("$ref")
        return target(name, self._root) if isinstance(name, str) else None


def _values(value: Any) -> Iterator[Any]:
    """A value and those inside it."""
    yield value
    for child in _children(value):
        yield from _values(child)


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in a schema, the inner ones first: a count then finds those below it."""
    for child in _children(schema):
        yield from _nodes(child)
    if isinstance(schema, dict):
        yield schema


def _patterns(schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(pattern := schema.get("pattern"), str):
        yield pattern
    if isinstance(named := schema.get("patternProperties"), dict):
        yield from named
