"""The types that a schema allows in any form, and the value that a parameter's plain text stands for."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

import jsonschema
import pytest

from lmstate.errors import GrammarError
from lmstate.text.grammars.lark import json_term
from lmstate.text.grammars.schema_bounds import check_schema
from lmstate.text.grammars.schema_types import BOUNDS, TYPES, types_of, value_of

DEFS = {
    "$defs": {"name": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}, "maybe": {"$ref": "#/$defs/name"}},
    "properties": {},
}
STRINGS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": ["string"]},
    {"enum": ["1", "true"]},
    {"const": "null"},
    {"anyOf": [{"type": "string"}, {"const": "5"}]},
    {"allOf": [{"type": ["string", "null"]}, {"enum": ["12345", "true", "null"]}]},
    {"$ref": "#/$defs/maybe"},
    {"oneOf": [{"$ref": "#/$defs/name"}]},
]
TEXTS = ["12345", "true", "null", "1.5", "[1]", '{"a": 1}', "word", "", "007", '"quoted"', "9007199254740993"]


@pytest.mark.parametrize("schema", STRINGS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_string_in_any_form_stays_a_string(schema: dict[str, Any], text: str) -> None:
    assert types_of(schema, DEFS) == {"string"}
    assert value_of(text, schema, DEFS) == text


@pytest.mark.parametrize(
    "kinds", [*itertools.combinations(sorted(TYPES), 2), *itertools.combinations(sorted(TYPES), 3)]
)
@pytest.mark.parametrize("form", ["list", "anyOf", "oneOf", "ref"])
def test_a_value_fits_its_schema_where_one_can(kinds: tuple[str, ...], form: str) -> None:
    root: dict[str, Any] = {"$defs": {kind: {"type": kind} for kind in kinds}}
    schema: dict[str, Any] = {"type": list(kinds)}
    if form == "ref":
        schema = {"anyOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds]}
    elif form != "list":
        schema = {form: [{"type": kind} for kind in kinds]}
    for text in TEXTS:
        value = value_of(text, schema, root)
        possible = [text] if "string" in kinds else []
        with contextlib.suppress(ValueError):
            possible.append(json.loads(text))
        whole = {**root, "type": list(kinds)}
        fits = [one for one in possible if jsonschema.Draft202012Validator(whole).is_valid(one)]
        assert value in fits or not fits, (kinds, text, value)


def test_null_and_numbers_beside_strings_are_themselves() -> None:
    either = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert value_of("null", either, {}) is None
    assert value_of("12345", either, {}) == "12345"
    assert value_of("12345", {"type": ["string", "integer"]}, {}) == 12345
    assert value_of("1", {"enum": ["1", 2]}, {}) == "1"
    assert value_of("2", {"enum": ["1", 2]}, {}) == 2


def test_schemas_that_say_nothing_or_run_in_circles_allow_everything() -> None:
    assert types_of({}) == types_of(True) == types_of({"$ref": "#/$defs/loop"}, DEFS) == TYPES
    assert types_of({"$ref": "elsewhere.json"}) == types_of({"$ref": "#/$defs/none"}, DEFS) == TYPES
    assert value_of("True", {"type": "boolean"}, {}) is True


LARGE = 2**53 + 1


@pytest.mark.parametrize(
    "place", [lambda one: one, lambda one: {"properties": {"id": one}}, lambda one: {"anyOf": [one]}]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_that_float64_may_not_hold_are_refused_by_name(place: Any, sign: int) -> None:
    for strict, schema in [
        *((both, {"const": sign * LARGE}) for both in (True, False)),
        *((both, {"enum": [1, sign * LARGE]}) for both in (True, False)),
        *((both, {"const": {"id": [sign * LARGE]}}) for both in (True, False)),
        *((True, {word: sign * LARGE}) for word in BOUNDS),
    ]:
        word = next(iter(schema))
        with pytest.raises(GrammarError, match=rf"{word} -?{LARGE}"):
            check_schema(place(schema), "response_format", strict)


def test_bounds_that_cannot_be_followed_are_left_out_unless_strict() -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
    check_schema(schema, "tools", strict=False)
    assert "maximum" not in json_term(schema, strict=False) and "minimum" in json_term(schema, strict=False)
    check_schema({"maximum": 2**53, "const": -(2**53)}, "tools")
