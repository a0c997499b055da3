"""JSON schemas as a mask follows them: objects have the properties that are named, white space is bounded.

A model that may invent properties, or go on with blanks, does so up to the end of its answer. An object stays open
where its schema says so, names no properties, or is a part of others (`allOf`, or `anyOf` beside properties).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_BLANKS = 20  # in a row
GUIDANCE = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_BLANKS}}}"}
OPENING = frozenset(
    ("additionalProperties", "unevaluatedProperties", "patternProperties", "dependentSchemas", "propertyNames")
)
PARTS = ("allOf", "anyOf", "oneOf", "$ref", "if", "not")  # other schemas that may name properties of the same object
NAMED = ("properties", "$defs", "definitions")  # schemas by name
PLAIN = ("enum", "const", "default", "examples", "allOf", "not", "if", "then", "else", *OPENING)  # taken as they are


def masked(schema: Any, lenient: bool) -> Any:
    """The schema that the mask follows; `lenient`: as far as it can be followed."""
    if not isinstance(schema, dict):
        return schema
    guidance = {**GUIDANCE, "lenient": True} if lenient else GUIDANCE
    return {**_closed(schema, "#", frozenset(_parts_of_others(schema))), "x-guidance": guidance}


def _closed(schema: Any, path: str, open_paths: frozenset[str], close: bool = True) -> Any:
    if isinstance(schema, list):
        return [_closed(one, f"{path}/{index}", open_paths, close) for index, one in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    named = schema.get("properties")
    closes = isinstance(named, dict) and close and path not in open_paths and not schema.keys() & {*OPENING, *PARTS}
    required = schema.get("required")
    if isinstance(named, dict) and isinstance(required, list):
        closes = closes and all(isinstance(name, str) and name in named for name in required)  # else none would fit
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in PLAIN:
            made[key] = value
        elif key in NAMED and isinstance(value, dict):
            made[key] = {name: _closed(one, f"{path}/{key}/{name}", open_paths) for name, one in value.items()}
        elif key in ("anyOf", "oneOf"):
            made[key] = _closed(value, f"{path}/{key}", open_paths, close=close and named is None)
        else:
            made[key] = _closed(value, f"{path}/{key}", open_paths)
    return {**made, "additionalProperties": False} if closes else made


def _parts_of_others(schema: Any, inside: bool = False) -> Iterator[str]:
    """The references of schemas that are parts of others: their objects have properties that they do not name."""
    if isinstance(schema, list):
        for one in schema:
            yield from _parts_of_others(one, inside)
    elif isinstance(schema, dict):
        if isinstance(name := schema.get("$ref"), str) and (inside or "properties" in schema):
            yield name
        for key, value in schema.items():
            part = key == "allOf" or (key in ("anyOf", "oneOf") and (inside or "properties" in schema))
            yield from _parts_of_others(value, part)
