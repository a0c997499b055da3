"""JSON schemas, patterns and grammars in Python: the answers are the server's, and what is wrong is `GrammarError`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import lmstate
from lmstate.generation.params import SamplingParams
from tests.serve.byte_tokenizer import byte_tokenizer
from tests.serve.running import Running
from tests.serve.test_hostile_schemas import HOSTILE

USER = [{"role": "user", "content": "Tell me about rivers."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Rhine", "Rhone"]}, "km": {"type": "integer", "minimum": 100, "maximum": 999}},
    "required": ["name", "km"],
}
GBNF = 'root ::= name " " [0-9]+ "\\n"\nname ::= "Rhine" | "Rhone"'
LARK = 'start: NAME " is long"\nNAME: /Rhine|Rhone/'
CONSTRAINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name -> (in Python, over HTTP)
    "json_schema": ({"json_schema": SCHEMA}, {"guided_json": SCHEMA}),
    "its text": ({"json_schema": json.dumps(SCHEMA)}, {"guided_json": SCHEMA}),
    "regex": ({"regex": r"\d{4}-\d{2}/(a|b)+c"}, {"guided_regex": r"\d{4}-\d{2}/(a|b)+c"}),
    "GBNF": ({"grammar": GBNF}, {"grammar": GBNF}),
    "Lark": ({"grammar": LARK}, {"grammar": LARK}),
    **{
        format["type"]: ({"response_format": format}, {"response_format": format})
        for format in (
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "river", "schema": SCHEMA, "strict": True}},
        )
    },
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_answers_in_python_are_those_of_the_server(tiny: Running, name: str) -> None:
    ours, theirs = CONSTRAINTS[name]
    options: dict[str, Any] = {"max_new_tokens": 120, "temperature": 1.0, "seed": 3, **ours}
    model = tiny.engine.model
    with tiny.client() as client:
        body = {"messages": USER, "max_tokens": 120, "temperature": 1.0, "seed": 3, **theirs}
        expected = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert model.generate(USER, **options) == expected
    assert "".join(model.stream(USER, **options)) == expected
    assert model.chat(USER, **options) == expected
    assert tiny.engine.submit(USER, **options).result().texts[0] == expected
    if "schema" in name:
        assert json.loads(expected)["name"] in ("Rhine", "Rhone")


def test_every_row_of_a_batch_follows_the_constraint(tiny_model: lmstate.Model) -> None:
    answers = tiny_model.generate(["a", "b", "cc"], regex="[xyz]{2,4}!", temperature=1.0, seed=1)
    assert all(re.fullmatch("[xyz]{2,4}!", text) for text in answers)


def test_turns_of_a_session_follow_it(tiny: Running) -> None:
    session = tiny.engine.session("constrained")
    try:
        for _ in range(2):
            assert re.fullmatch("[xyz]{2}", session.send("more", regex="[xyz]{2}").result().texts[0])
    finally:
        session.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused(tiny: Running, name: str) -> None:
    state = tiny.engine.model.new_state()
    for submit in (tiny.engine.model.generate, tiny.engine.model.stream, tiny.engine.model.chat, tiny.engine.submit):
        with pytest.raises(lmstate.GrammarError, match="json_schema has a") as caught:
            submit(USER, json_schema=HOSTILE[name])
        assert caught.value.param == "json_schema"
    with pytest.raises(lmstate.GrammarError, match="json_schema has a"):
        tiny.engine.model.chat(USER, state, json_schema=HOSTILE[name])
    assert state.lengths == [0]


LOOP: dict[str, Any] = {}
LOOP["properties"] = LOOP
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no schema": ({"json_schema": 3}, "must be a JSON schema"),
    "no JSON": ({"json_schema": "{"}, "an object or its text"),
    "what JSON lacks": ({"json_schema": {"const": {1, 2}}}, "an object or its text"),
    "a loop": ({"json_schema": LOOP}, "an object or its text"),
    "lookahead": ({"regex": "(?=a)b"}, "look-ahead"),
    "open pattern": ({"regex": "(a"}, "cannot be used"),
    "bytes": ({"regex": b"a"}, "must be a string"),
    "GBNF": ({"grammar": "root ::= ("}, "not a GBNF grammar"),
    "Lark": ({"grammar": "start: missing"}, "cannot be used"),
    "long": ({"regex": "[" + "ab" * 2**18 + "]"}, "at most"),
    "format": ({"response_format": {"type": "xml"}}, "one of text, json_object"),
    "no format": ({"response_format": "json_object"}, "one of text, json_object"),
    "format without": ({"response_format": {"type": "json_schema"}}, "is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(tiny_model: lmstate.Model, name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(lmstate.GrammarError, match=message):
        tiny_model.generate("a", max_new_tokens=2, **given)


def test_one_constraint_at_a_time() -> None:
    with pytest.raises(ValueError, match="json_schema and regex were given"):
        SamplingParams(regex="a", json_schema={})


@pytest.mark.parametrize("opened", [False, True])
def test_an_answer_may_think_before_what_is_constrained(
    tmp_path: Path, tiny_model: lmstate.Model, opened: bool
) -> None:
    start = "<think>\n" if opened else ""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}<|im_start|>assistant\n"
        + start
        + "{# </think> #}"
    )
    tokenizer = byte_tokenizer(tmp_path, ["<think>", "</think>"], template)
    model = Compiling(tokenizer)
    talk = tokenizer.chat(USER)
    for text in ("<think>" * (not opened) + "so\n</think>\n7", "7"):
        grammar = SamplingParams(regex="[0-9]").compiled(model, talk).grammar  # type: ignore[arg-type]
        assert isinstance(grammar, lmstate.generation.Grammar)
        fits = True
        for token in tokenizer.encode(text, add_special_tokens=False):
            fits = fits and bool(grammar.allowed()[token])
            if fits:
                grammar.accept(token)
        assert (fits and grammar.complete) == (not opened or "think" in text)


class Compiling:
    """The part of a model that compiles constraints."""

    def __init__(self, tokenizer: Any) -> None:
        from lmstate.text.grammars.compiler import GrammarCompiler

        self.tokenizer = tokenizer
        self.grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size)
