"""The structs that bodies are read as: leniencies, what errors say, and the document that is made of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lmstate.serve.app import PATHS
from lmstate.serve.openapi import document
from lmstate.serve.wire.body import parse_body, read
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.schema.chat import ChatBody
from lmstate.serve.wire.schema.completions import CompletionBody
from lmstate.serve.wire.schema.responses import ResponseBody

HELLO = [{"role": "user", "content": "Hello"}]


def test_whole_floats_nulls_and_unknown_fields_are_taken() -> None:
    given = {"messages": HELLO, "n": 2.0, "max_tokens": 5.0, "temperature": 1, "stop": None, "unknown": [{}]}
    body = read(given, ChatBody)
    assert (body.n, body.max_tokens, body.temperature, body.stop) == (2, 5, 1.0, None)
    assert type(body.n) is int
    assert parse_body(b'\xef\xbb\xbf{"prompt": "a"}', CompletionBody).prompt == "a"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"n": 1.5}, "n must be a whole number from 1 to 128; it is a number: 1.5"),
        ({"n": 129}, "n must be a whole number from 1 to 128; it is a number: 129"),
        ({"n": True}, "n must be a whole number from 1 to 128; it is a boolean: true"),
        ({"temperature": -1}, "temperature must be a number from 0 to 100; it is a number: -1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0, at most 100; it is a number: 0"),
        ({"stream": "yes"}, 'stream must be true or false; it is a string: "yes"'),
        ({"messages": []}, "messages must be an array of 1 to 20000, each an object; it is an array: []"),
        ({"messages": None}, "messages must be an array of 1 to 20000, each an object; it is missing"),
        ({"messages": [{}]}, "messages[0].role must be one of assistant, developer, system, tool, user; it is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text must be a string; it is a number: 3",
        ),
        ({"chat_template": "x"}, "chat_template is not supported here: conversations are rendered by"),
        ({"stop": ["x" * 2000]}, "stop[0] must be a string of at most 1024 characters; it is a string"),
        (
            {"logit_bias": {"3": 200}},
            "logit_bias must be an object of at most 4096 names, each with a number from -100 to 100; it is an object",
        ),
        ({"tool_choice": 3}, "tool_choice must be a string or an object; it is a number: 3"),
    ],
)
def test_errors_say_where_what_was_expected_and_what_came(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ApiError) as caught:
        read({"messages": HELLO, **changes}, ChatBody)
    assert caught.value.message.startswith(told)
    assert caught.value.param == re.split(" (?:must|is) ", told)[0]


def test_the_document_has_every_field_of_every_body_with_its_range() -> None:
    schemas = document(PATHS)["components"]["schemas"]
    for path in PATHS:
        if path.body is not None:
            assert set(schemas[path.body.__name__]["properties"]) == set(path.body.__struct_encode_fields__)
    chat = schemas["ChatBody"]["properties"]
    assert {"minimum": 0, "maximum": 1, "type": "number"} in chat["min_p"]["anyOf"]
    assert {"minimum": 0, "maximum": 2**31, "type": "integer"} in chat["thinking_token_budget"]["anyOf"]
    assert set(schemas["ResponseBody"]["properties"]) == set(ResponseBody.__struct_encode_fields__)
    for name in re.findall(r"#/components/schemas/(\w+)", str(document(PATHS))):
        assert name in schemas
