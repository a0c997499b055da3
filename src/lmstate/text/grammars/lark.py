"""Texts of Lark grammars: of JSON schemas, regular expressions, words, and grammars of others.

The names of errors are `param`. All of them raise `GrammarError` for what is wrong or too large.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from lmstate.errors import GrammarError
from lmstate.text.grammars.closed_schema import masked
from lmstate.text.grammars.schema_bounds import check_pattern, check_schema
from lmstate.text.grammars.schema_types import BOUNDS, is_too_large

LOOKAROUND = re.compile(r"\(\?<?[=!]")
MISSING = "JSON schemas, patterns and grammars need llguidance: pip install 'lmstate[structured]'"
ANYTHING = r"/(.|\n)*/"
# Classes of a pattern that are ASCII's in JSON schemas and in other servers, and Unicode's in llguidance; and the slash
# that would end the pattern.
ESCAPES = {
    "/": r"\/",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}


def json_object() -> str:
    """The grammar of any JSON object."""
    return of_schema({"type": "object"}, "response_format")


def of_schema(schema: Any, param: str, strict: bool = True) -> str:
    """The grammar of JSON that fits a schema; unless `strict`, as far as it can be followed."""
    check_schema(schema, param, strict)
    return f"start: {json_term(schema, strict)}"


def of_pattern(pattern: str, param: str) -> str:
    """The grammar of texts that match a regular expression, all of them."""
    check_pattern(pattern, param)
    # A slash may come escaped already, as in patterns of JavaScript.
    escaped = re.sub(r"\\.|/", lambda found: ESCAPES.get(found[0], found[0]), pattern, flags=re.DOTALL)
    return f"start: /{escaped}/"


def of_words(words: Sequence[str]) -> str:
    """The grammar of one of several texts."""
    return "start: " + " | ".join(map(quoted, words))


def of_grammar(text: str, param: str) -> str:
    """A grammar in Lark, or in GBNF (told by `::=`), within one of ours: its rules may have any names."""
    if "::=" in text:
        try:
            from llguidance.gbnf_to_lark import any_to_lark
        except ModuleNotFoundError:
            raise ImportError(MISSING) from None
        try:
            text = any_to_lark(text)
        except Exception as error:  # the converter raises bare Exception
            raise GrammarError(f"{param} is not a GBNF grammar: {str(error)[:300]}", param) from None
    return f"start: %lark {{\n{text}\n}}"


def quoted(text: str) -> str:
    """A string as a term of Lark."""
    return json.dumps(text, ensure_ascii=False)


def json_term(schema: Any, strict: bool) -> str:
    """JSON that fits a schema, as a term of Lark; unless `strict`, as far as it can be followed."""
    return "%json " + json.dumps(masked(schema if strict else _followed(schema), lenient=not strict))


def _followed(schema: Any) -> Any:
    """A schema without what the mask cannot follow: lookarounds, and bounds that float64 may not hold."""
    if isinstance(schema, list):
        return [_followed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in BOUNDS and is_too_large(value):
            continue
        if key == "pattern" and isinstance(value, str) and LOOKAROUND.search(value):
            continue
        if key == "patternProperties" and isinstance(value, dict):
            value = {pattern: one for pattern, one in value.items() if not LOOKAROUND.search(pattern)}
        kept[key] = _followed(value)
    return kept
