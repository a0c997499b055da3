"""Formats of newer families: channels of Inkling and Command A, MiniMax-M3's nested tags, markers made of constants."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate.serve.answer.grammar import Grammars
from lmstate.serve.answer.reasoning import reasoning_of
from lmstate.serve.tools import CallArguments, CallStart, Text, Tool, format_of
from lmstate.serve.tools.events import Reasoning
from lmstate.serve.tools.reader import Parser
from lmstate.text.endings import end_ids
from lmstate.text.thinking import spelled_out
from tests.serve.byte_tokenizer import byte_tokenizer
from tests.serve.test_tool_formats import BY_NAME, KEYS, M3, TOOLS, Answer, parsed, schema_of

CALL = '<|content_invoke_tool_json|>{"args":{"city":"Rome"},"name":"get_weather"}<|end_message|>'
# (format, what the model writes, what it thinks, says and calls)
ANSWERS = [
    (
        "inkling",
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Yes.<|end_message|>"
        f"<|message_model|>get_weather{CALL}<|content_model_end_sampling|>",
        Answer("Yes.", "Hm.", [("get_weather", {"city": "Rome"})]),
    ),
    ("inkling", CALL, Answer("", "", [("get_weather", {"city": "Rome"})])),
    ("inkling", "Plain.", Answer("Plain.", "", [])),
    ("inkling", "Plain.<|message_model|><|content_text|> More.", Answer("Plain. More.", "", [])),
    ("inkling", "<|content_invoke_tool_json|>[1]<|end_message|>", Answer("[1]", "", [])),
    ("inkling", "<|content_text|>Cut", Answer("Cut", "", [])),
    ("cohere", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", Answer("Yes.", "", [])),
    (
        "cohere_text",
        '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]<|END_ACTION|><|START_TEXT|>Yes.<|END_TEXT|>',
        Answer("Yes.", "", [("now", {})]),
    ),
    (
        "minimax_m3",
        f'{M3}<tool_call>{M3}<invoke name="now">{M3} <at>{M3}<x>1{M3}</x>{M3}<y>{M3}<item>a{M3}</item>{M3}</y>{M3}</at>'
        f"{M3}</invoke>{M3}</tool_call>",
        Answer("", "", [("now", {"at": {"x": 1, "y": ["a"]}})]),
    ),
    (
        "solar",
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|><|begin|>assistant<|tool_calls|>"
        '<|tool_call:begin|>0<|tool_call:name|>now<|tool_call:args|>{"a": 1}<|tool_call:end|>',
        Answer("Yes.", "Hm.", [("now", {"a": 1})]),
    ),
    ("solar", "Plain.<|end|><|begin|>assistant<|content|> More.", Answer("Plain. More.", "", [])),
    (
        "solar",
        "<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>now<|tool_call:end|>",
        Answer("", "", [("now", {})]),
    ),
    (
        "muse",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes. to=x<|eom|><|start|>assistant to=now"
        '<|message|><atem:function_calls>\n<atem:invoke name="now">\n<atem:parameter name="a">1</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>",
        Answer("Yes. to=x", "Hm.", [("now", {"a": 1})]),
    ),
    ("muse", "<|message|>Yes.<|eot|>", Answer("Yes.", "", [])),
    ("muse", " to=user<|message|>Write <atem:function_calls>.<|eot|>", Answer("Write <atem:function_calls>.", "", [])),
    ("muse", "Plain.", Answer("Plain.", "", [])),
    ("ernie", "<response>\nYes.\n</response>\n", Answer("Yes.", "", [])),
    ("apertus", '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>Yes.', Answer("Yes.", "", [("now", {})])),
]


@pytest.mark.parametrize(("name", "text", "expected"), ANSWERS)
def test_answers_are_read_in_their_channels(name: str, text: str, expected: Answer) -> None:
    for pieces in ([text], list(text)):
        assert parsed(name, pieces) == expected


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<[]>"), min_size=1, max_size=8)
NESTED = st.recursive(
    st.booleans() | st.integers(-999, 999) | WORDS,
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(KEYS, inner, min_size=1, max_size=3),
    max_leaves=8,
)


def tags(value: object) -> str:
    """A value as MiniMax-M3's template writes it."""
    if isinstance(value, dict):
        return "".join(f"{M3}<{key}>{tags(one)}{M3}</{key}>" for key, one in value.items())
    if isinstance(value, list):
        return "".join(f"{M3}<item>{tags(one)}{M3}</item>" for one in value)
    return value if isinstance(value, str) else json.dumps(value)


def written(arguments: dict[str, object]) -> str:
    return f'{M3}<tool_call>\n{M3}<invoke name="send">{tags(arguments)}{M3}</invoke>\n{M3}</tool_call>'


def closed(schema: dict[str, object]) -> dict[str, object]:
    """A schema whose lists hold values of the kind of their first."""
    if "items" in schema:
        options = schema["items"]
        return {"type": "array", "items": closed(options["anyOf"][0])}  # type: ignore[index]
    if "properties" in schema:
        inside = {key: closed(one) for key, one in schema["properties"].items()}  # type: ignore[attr-defined]
        return {**schema, "properties": inside, "additionalProperties": False}
    return schema


@settings(max_examples=100, deadline=None)
@given(given_arguments=st.dictionaries(KEYS, NESTED, max_size=3), size=st.integers(1, 9))
def test_nested_tags_are_read_by_their_schema(given_arguments: dict[str, object], size: int) -> None:
    given_arguments = {key: first_of(value) for key, value in given_arguments.items()}  # of one kind: tags tell none
    tool = Tool("send", "", schema_of(given_arguments))
    text = written(given_arguments)
    parser = Parser(lambda reader: BY_NAME["minimax_m3"].parse(reader, [tool]))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    assert [event.name for event in events if isinstance(event, CallStart)] == ["send"]
    assert json.loads("".join(e.text for e in events if isinstance(e, CallArguments))) == given_arguments
    assert not any(isinstance(event, Text | Reasoning) for event in events)


@pytest.mark.parametrize("special", [False, True])
def test_the_grammar_of_nested_tags_follows_their_schema(special: bool, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, [M3, "<tool_call>", "</tool_call>"] if special else [])
    grammars = Grammars(tokenizer, tokenizer.vocab_size)

    @settings(max_examples=25, deadline=None, database=None)
    @given(given_arguments=st.dictionaries(KEYS, NESTED, min_size=1, max_size=3))
    def check(given_arguments: dict[str, object]) -> None:
        first = {key: first_of(value) for key, value in given_arguments.items()}
        tool = Tool("send", "", closed(schema_of(first)), strict=True)
        lark = grammars.calls(BY_NAME["minimax_m3"], [tool], required=True, parallel=False)
        assert lark is not None
        for text, right in ((written(first), True), (written({**first, "zz": 1}), "zz" in first)):
            grammar, walked = grammars.compile(lark, "tools"), True
            for token in tokenizer.encode(text, add_special_tokens=False):
                allowed = grammar.allowed()
                walked = walked and (allowed is None or bool(allowed[token]))
                if walked:
                    grammar.accept(token)
            assert (walked and grammar.complete) == right, (text, lark)

    check()


def first_of(value: object) -> object:
    """A value with the first of each list alone."""
    if isinstance(value, list):
        return [first_of(value[0])]
    return {key: first_of(one) for key, one in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("schema", [{"anyOf": 5}, {"oneOf": True}, {"anyOf": [5]}, {"items": 5}, {"$ref": 5}])
def test_schemas_that_are_none_are_read_past(schema: dict[str, object]) -> None:
    tool = Tool("now", "", {"type": "object", "properties": {"a": schema}})
    text = f'{M3}<invoke name="now">{M3}<a>{M3}<b>1{M3}</b>{M3}</a>{M3}</invoke>'
    parser = Parser(lambda reader: BY_NAME["minimax_m3"].parse(reader, [tool]))
    events = parser.push(text) + parser.finish()
    assert json.loads("".join(e.text for e in events if isinstance(e, CallArguments))) == {"a": {"b": 1}}


def test_tags_in_tags_end_somewhere() -> None:
    deep = 100_000
    text = f'{M3}<invoke name="now">' + f"{M3}<a>" * deep + f"{M3}</a>" * deep + f"{M3}</invoke>"
    parser = Parser(lambda reader: BY_NAME["minimax_m3"].parse(reader, TOOLS))
    assert json.loads("".join(e.text for e in parser.push(text) + parser.finish() if isinstance(e, CallArguments)))


def test_markers_made_of_constants_are_known() -> None:
    hunyuan = "{%- set SUFFIX = ':opensource' -%}{{ '<think{}>'.format(SUFFIX) ~ '</think{}>'.format(SUFFIX) }}"
    third = hunyuan + "{{ '<tool_sep{}>'.format(SUFFIX) ~ '<arg_key{}>'.format(SUFFIX) }}"
    fourth = hunyuan + "{{ '<arg_key{}>'.format(SUFFIX) }}"
    assert format_of(third) is BY_NAME["hy_v3_suffixed"]
    assert format_of(fourth) is BY_NAME["hy_v4"]
    for template in (third, fourth):
        markers = reasoning_of(template)
        assert markers is not None and markers.end == "</think:opensource>"
    assert spelled_out("{{ 'a{}'.format(OTHER) }}") == "{{ 'a{}'.format(OTHER) }}"


@pytest.mark.parametrize(
    ("template", "tools", "end"),
    [
        ("{% set mark = ']<]minimax[>[' %}{{ mark }} <mm:think></mm:think>", "minimax_m3", "</mm:think>"),
        ("<|START_ACTION|> <|START_TEXT|> <|END_THINKING|>", "cohere_text", "<|END_THINKING|>"),
        ("{% set mark = '｜DSML｜' %}{{ '<' + mark + 'tool_calls>' }} </think>", "dsml_calls", "</think>"),
        ("{% set mark = '｜DSML｜' %}{{ '<' + mark + 'function_calls>' }} </think>", "dsml", "</think>"),
        ("<function_calls>' + message['function_calls'] + '</function_calls> <think></think>", "olmo3", "</think>"),
        ("<tool_call>\n{name}\n</tool_call> </think> <response>", "ernie", "</think>"),
        ("<beginning_of_sentence>ai <tool_calls>\n{name}\n</tool_calls> </think>", "minimax_m1", "</think>"),
        ("<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value> </think>", "glm_4_7", "</think>"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value> </think>", "glm", "</think>"),
    ],
)  # fmt: skip
def test_newer_templates_are_told_apart(template: str, tools: str, end: str) -> None:
    assert format_of(template) is BY_NAME[tools]
    markers = reasoning_of(template)
    assert markers is not None and markers.end == end


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        ("<|start|>assistant to=self<|message|> <atem:function_calls>", "muse"),
        ("<|begin|>assistant<|tool_calls|><|tool_call:begin|>", "solar"),
        ("<|action_start|><|plugin|>", "internlm"),
        ("functools[{name}]", "functools"),
        ("<function_call> {name}", "granite_20b"),
    ],
)
def test_channels_and_markers_of_newer_templates_are_known(template: str, tools: str) -> None:
    assert format_of(template) is BY_NAME[tools]
    assert reasoning_of(template) is None


@pytest.mark.parametrize("name", [name for name, format in BY_NAME.items() if format.channels])
def test_channels_are_read_without_tools(name: str) -> None:
    """Their markers are no part of the text."""
    head = "".join(map(json.loads, re.findall(r'"(?:[^"\\]|\\.)*"', BY_NAME[name].head(json.dumps))))
    parser = Parser(lambda reader: BY_NAME[name].parse(reader, []))
    events = parser.push(f"{head}Yes.") + parser.finish()
    assert "".join(event.text for event in events if isinstance(event, Text)) == "Yes."
    assert not any(isinstance(event, CallStart) for event in events)


def test_the_end_of_a_message_is_not_the_end_of_an_answer() -> None:
    ids = {"<|start|>": 1, "<|message|>": 2, "<|eom|>": 3, "<|eot|>": 4}
    assert end_ids({3, 4}, ids.get) == {4}
    assert end_ids({3}, {"<|eom|>": 3, "<|eot|>": 4}.get) == {3, 4}
