"""Under the mask an object has the properties that its schema names, unless the schema opens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate.serve.answer.grammar import Grammars
from lmstate.text.grammars import lark
from lmstate.text.grammars.closed_schema import MAX_BLANKS, masked
from tests.serve.byte_tokenizer import byte_tokenizer

NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}}}
CASES: list[tuple[dict[str, Any], str, bool]] = [
    (NAMED, '{"a": 1}', True),
    (NAMED, '{"a": 1, "b": 2}', False),
    ({**NAMED, "additionalProperties": True}, '{"a": 1, "b": 2}', True),
    ({**NAMED, "additionalProperties": {"type": "integer"}}, '{"a": 1, "b": 2}', True),
    ({"type": "object"}, '{"b": 2}', True),
    ({"type": "object", "properties": {}}, '{"b": 2}', False),
    ({"type": "array", "items": NAMED}, '[{"a": 1, "b": 2}]', False),
    ({"anyOf": [NAMED, {"type": "null"}]}, '{"a": 1, "b": 2}', False),
    ({"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"}, '{"next": {"next": null}}', True),
    ({"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"}, '{"next": {"other": null}}', False),
    ({"allOf": [NAMED, {"type": "object", "properties": {"b": {"type": "integer"}}}]}, '{"a": 1, "b": 2}', True),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, '{"b": 2}', True),
    ({"$defs": {"A": NAMED}, "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}]}, '{"a": 1, "b": 2}', True),
    (NAMED, "{" + " " * MAX_BLANKS + '"a": 1}', True),
    (NAMED, "{" + " " * (MAX_BLANKS + 1) + '"a": 1}', False),
    (NAMED, json.dumps({"a": 1}, indent=8), True),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("schema", "text", "fits"), CASES, ids=str)
def test_the_mask_lets_through_what_the_schema_names(
    tmp_path: Path, schema: dict[str, Any], text: str, fits: bool, strict: bool
) -> None:
    grammars = Grammars(byte_tokenizer(tmp_path), 300)
    grammar = grammars.compile(lark.of_schema(schema, "x", strict), "x")
    tokens = grammars._tokenizer.encode(text, add_special_tokens=False)
    taken = 0
    for token in tokens:
        allowed = grammar.allowed()
        if allowed is None or not allowed[token]:
            break
        grammar.accept(token)
        taken += 1
    assert (taken == len(tokens) and grammar.complete) == fits


SCHEMAS = st.recursive(
    st.sampled_from([{"type": "integer"}, {"type": "string"}, {"type": "object"}, {"enum": ["x", 1]}]),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("abc"), inner)}
        ),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
    ),
    max_leaves=8,
)
VALUES = st.recursive(
    st.sampled_from([1, "x", "y"]),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(schema=SCHEMAS, value=VALUES)
def test_what_fits_the_closed_schema_fits_the_schema(schema: dict[str, Any], value: Any) -> None:
    if jsonschema.Draft202012Validator(masked(schema, lenient=True)).is_valid(value):
        jsonschema.Draft202012Validator(schema).validate(value)
