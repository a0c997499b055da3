"""The JSON types that a schema allows, for formats that write a parameter's value as plain text."""

from __future__ import annotations

import json
from typing import Any

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_INTEGER = 2**53  # the mask's library holds numbers as float64, where larger integers run together
DEEPEST = 32  # references and alternatives that are followed
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def types_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """The types of JSON that a schema allows: all of them where it says nothing, or nests too deep to tell.

    `root` is the schema that `$ref` points into: the schema itself by default. An integer is a number too.
    """
    root = schema if root is None else root
    if not isinstance(schema, dict) or depth > DEEPEST:
        return frozenset() if schema is False else TYPES
    found = TYPES
    kind = schema.get("type")
    if isinstance(kind, str):
        found &= _with_integers({kind})
    elif isinstance(kind, list):
        found &= _with_integers({one for one in kind if isinstance(one, str)})
    if "const" in schema:
        found &= _type_of(schema["const"])
    if isinstance(schema.get("enum"), list):
        found &= frozenset().union(*map(_type_of, schema["enum"]))
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list) and options:
            found &= frozenset().union(*(types_of(one, root, depth + 1) for one in options))
    for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= types_of(one, root, depth + 1)
    if isinstance(schema.get("$ref"), str):
        found &= types_of(target(schema["$ref"], root), root, depth + 1)
    return found


def is_text(schema: Any, root: Any) -> bool:
    """Whether a value is a string whatever it says."""
    return types_of(schema, root) == {"string"}


def value_of(text: str, schema: Any, root: Any) -> Any:
    """The value that a parameter's plain text stands for.

    Where the schema allows strings and other types, text that is JSON of one of the others is that value, and all else
    the string as it stands; an `enum` decides first. Where it allows no strings, or says nothing, JSON is its value.
    """
    types = types_of(schema, root)
    words = schema.get("enum") if isinstance(schema, dict) else None
    if types == {"string"} or (isinstance(words, list) and text in words):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        lower = text.strip().lower()
        return lower == "true" if "boolean" in types and types != TYPES and lower in ("true", "false") else text
    if "string" in types and types != TYPES and not _type_of(value) & (types - {"string"}):
        return text
    return value


def is_too_large(value: Any) -> bool:
    """Whether a value is an integer that float64 may not hold."""
    return type(value) is int and abs(value) > MAX_INTEGER


def _with_integers(types: set[str]) -> frozenset[str]:
    return frozenset(types | {"integer"} if "number" in types else types) & TYPES


def _type_of(value: Any) -> frozenset[str]:
    """The type of one value; a whole number is an integer, and none other."""
    if isinstance(value, float) and value.is_integer():
        return frozenset({"integer", "number"})
    return frozenset({NAMES.get(type(value), "null")})


def target(reference: str, root: Any) -> Any:
    """The schema that a `$ref` into the same document points to; True, which allows all, if there is none."""
    if not reference.startswith("#"):
        return True
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return True
    return found
