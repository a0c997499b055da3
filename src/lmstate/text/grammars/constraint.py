"""Constraints on answers as callers write them: a JSON schema, a regular expression, a grammar, a response format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmstate.errors import GrammarError
from lmstate.text.grammars import lark

FORMATS = ("text", "json_object", "json_schema", "regex", "grammar")


@dataclass(frozen=True)
class Constraint:
    """A grammar that the answer must fit. `param` is the field that asked for it."""

    lark: str
    param: str

    @classmethod
    def of_schema(cls, schema: Any, param: str, strict: bool = True) -> Constraint:
        """JSON that fits a schema, which is an object or its text; unless `strict`, as far as it can be followed."""
        return cls(lark.of_schema(_parsed(schema, param), param, strict), param)

    @classmethod
    def of_pattern(cls, pattern: Any, param: str) -> Constraint:
        """Texts that a regular expression matches from the first character to the last."""
        return cls(lark.of_pattern(_text(pattern, param), param), param)

    @classmethod
    def of_grammar(cls, grammar: Any, param: str) -> Constraint:
        """Texts of a grammar in Lark or GBNF."""
        return cls(lark.of_grammar(_text(grammar, param), param), param)


def of_format(given: Any, path: str = "response_format") -> Constraint | None:
    """The constraint of OpenAI's `response_format`, whose `type` is one of `FORMATS`; None for plain text.

    `{"type": "json_schema", "json_schema": {"schema": {...}, "strict": true}}`, or the schema without the object around
    it. Formats of type regex have a `pattern`, those of type grammar a `grammar`. Raises `GrammarError`.
    """
    if not isinstance(given, Mapping) or given.get("type") not in FORMATS:
        raise GrammarError(
            f"{path} is {given!r:.80}; it must be an object whose type is one of {', '.join(FORMATS)}", path
        )
    kind = given["type"]
    if kind == "text":
        return None
    if kind == "grammar":
        return Constraint.of_grammar(given.get("grammar"), f"{path}.grammar")
    if kind == "regex":
        return Constraint.of_pattern(given.get("pattern"), f"{path}.pattern")
    if kind == "json_object" and given.get("schema") is None:
        return Constraint(lark.json_object(), path)
    holder, name = given, f"{path}.schema"
    if isinstance(inner := given.get("json_schema"), Mapping):
        holder, name = inner, f"{path}.json_schema.schema"
    if holder.get("schema") is None:
        raise GrammarError(f"{name} must be a JSON schema; it is missing", name)
    return Constraint.of_schema(holder["schema"], name, bool(holder.get("strict")))


def _text(given: Any, param: str) -> str:
    if not isinstance(given, str):
        raise GrammarError(f"{param} must be a string; it is {given!r:.80}", param)
    return given


def _parsed(schema: Any, param: str) -> Any:
    """A JSON schema as JSON has it: with lists for tuples, and nothing that holds itself."""
    try:
        return json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (TypeError, ValueError, RecursionError):
        raise GrammarError(
            f"{param} must be a JSON schema, an object or its text; it is {schema!r:.80}", param
        ) from None
