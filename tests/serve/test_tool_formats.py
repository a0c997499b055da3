"""Every format: what models write is parsed however it is cut, and its grammar admits exactly well-formed calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate.serve.answer.grammar import Grammars
from lmstate.serve.tools import FORMATS, CallArguments, CallStart, Text, Tool, format_of
from lmstate.serve.tools.events import Reasoning
from lmstate.serve.tools.reader import Parser
from lmstate.text.tokenizer import Tokenizer
from tests.serve.byte_tokenizer import byte_tokenizer

TOOLS = [
    Tool(
        "get_weather",
        "Tells the weather.",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool("now", "Tells the time."),
]
CITY = 'Zürich "West" <b>'
CALL = {"city": CITY, "days": 3}
JSON = json.dumps(CALL, ensure_ascii=False)

M3 = "]<]minimax[>["
HUNYUAN_3 = (
    f"<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>"
)
COHERE = (
    f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {JSON}}},\n'
    '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>'
)


def suffixed(text: str) -> str:
    """A text of Hunyuan with the suffix that its published tags have."""
    return re.sub(r"<(/?(?:tool|arg)_\w+)>", r"<\1:opensource>", text)


SAMPLES = {
    "hermes": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    "jamba": (
        f'<tool_calls>[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]'
        "</tool_calls>"
    ),
    "nemotron": (
        f'<TOOLCALL>[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]</TOOLCALL>'
    ),
    "phi": (
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]'
        "<|/tool_call|>"
    ),
    "qwen_xml": (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n'
        f'<parameter name="city">{CITY}</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    ),
    "dsml": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{CITY}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    ),
    "dsml_calls": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{CITY}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    ),
    "dots": (
        '<dots_function_call>\n<invoke name="get_weather">\n'
        f'<parameter name="city">{CITY}</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</dots_function_call>'
    ),
    "seed": (
        f"<seed:tool_call>\n<function=get_weather>\n<parameter=city>{CITY}</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
    ),
    "minimax_m3": (
        f'{M3}<tool_call>\n{M3}<invoke name="get_weather">{M3}<city>{CITY}{M3}</city>{M3}<days>3{M3}</days>'
        f'{M3}</invoke>\n{M3}<invoke name="now">{M3}</invoke>\n{M3}</tool_call>'
    ),
    "glm_4_7": (
        f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>"
    ),
    "hy_v3": HUNYUAN_3,
    "hy_v3_suffixed": suffixed(HUNYUAN_3),
    "hy_v4": suffixed(
        f"<tool_calls>\n<tool_call>get_weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>\n<tool_call>now</tool_call>\n</tool_calls>"
    ),
    "glm": (
        f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
    ),
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v3": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{JSON}"
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "lfm2": (
        f"<|tool_call_start|>[get_weather(city={json.dumps(CITY, ensure_ascii=False)}, days=3), now()]<|tool_call_end|>"
    ),
    "gemma": (
        f'<|tool_call>call:get_weather{{city:<|"|>{CITY}<|"|>,days:3}}<tool_call|><|tool_call>call:now{{}}<tool_call|>'
    ),
    "function_gemma": (
        f"<start_function_call>call:get_weather{{city:<escape>{CITY}<escape>,days:3}}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>"
    ),
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}",
    "mistral_list": (
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]'
    ),
    "longcat": (
        f'<longcat_tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</longcat_tool_call>'
        '<longcat_tool_call>\n{"name": "now", "arguments": {}}\n</longcat_tool_call>'
    ),
    "apertus": f'<|tools_prefix|>[{{"get_weather": {JSON}}}, {{"now": {{}}}}]<|tools_suffix|>',
    "cohere": COHERE,
    "cohere_text": COHERE,
    "inkling": (
        f'get_weather<|content_invoke_tool_json|>{{"name":"get_weather","args":{JSON}}}<|end_message|>'
        '<|message_model|>now<|content_invoke_tool_json|>{"name":"now","args":{}}<|end_message|>'
    ),
    "functools": (f'functools[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]'),
    "minimax_m1": (
        f'<tool_calls>\n{{"name": "get_weather", "arguments": {JSON}}}\n'
        '{"name": "now", "arguments": {}}\n</tool_calls>'
    ),
    "granite_20b": (
        f'<function_call> {{"name": "get_weather", "arguments": {JSON}}} '
        '<function_call> {"name": "now", "arguments": {}}'
    ),
    "internlm": (
        f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {JSON}}}<|action_end|>\n'
        '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}<|action_end|>'
    ),
    "ernie": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "olmo3": (
        f"<function_calls>get_weather(city={json.dumps(CITY, ensure_ascii=False)}, days=3)\nnow()</function_calls>"
    ),
    "solar": (
        f"<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{JSON}"
        "<|tool_call:end|><|tool_call:begin|>0<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>"
    ),
    "muse": (
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        f'<atem:parameter name="city">{CITY}</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n"
        '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>'
    ),
    "llama": f'{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}',
    "harmony": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{JSON}<|call|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{}}"
    ),
}
BY_NAME = {format.name: format for format in FORMATS}
# Formats in which an answer is text or calls, and not one after the other.
EITHER = {name for name, format in BY_NAME.items() if format.rules(TOOLS, json.dumps).text}


@dataclass
class Answer:
    text: str
    reasoning: str
    calls: list[tuple[str, object]]


def parsed(name: str, pieces: list[str]) -> Answer:
    parser = Parser(lambda reader: BY_NAME[name].parse(reader, TOOLS))
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
    return Answer(
        "".join(event.text for event in events if isinstance(event, Text)),
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        [(name, json.loads(arguments)) for name, arguments in calls],
    )


EXPECTED = [("get_weather", CALL), ("now", {})]


def test_every_format_has_a_sample() -> None:
    assert set(SAMPLES) == set(BY_NAME)


@pytest.mark.parametrize("name", SAMPLES)
def test_calls_are_parsed_whole_and_character_by_character(name: str) -> None:
    before = "" if name in EITHER else "Let me <look>.\n"
    text = before + SAMPLES[name]
    for pieces in ([text], list(text)):
        answer = parsed(name, pieces)
        assert answer.calls == EXPECTED
        assert answer.text.strip() == before.strip()


@pytest.mark.parametrize("name", SAMPLES)
def test_an_answer_that_ends_inside_of_its_last_marker_shows_none_of_it(name: str) -> None:
    text = SAMPLES[name]
    for end in range(text.rindex("}") + 1 if "}" in text else len(text), len(text) + 1):
        assert parsed(name, [text[:end]]).text.strip() == "", text[end - 5 : end]


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_where_the_text_is_cut_does_not_matter(name: str, data: st.DataObject) -> None:
    text = SAMPLES[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert parsed(name, pieces) == parsed(name, [text])


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_calls_end_without_an_error_and_cut_the_same(name: str, data: st.DataObject) -> None:
    text = SAMPLES[name]
    at = data.draw(st.integers(0, len(text)))
    damage = data.draw(st.sampled_from(["", "}", '"', "<", "\n", "{", "</tool_call>", "[", ","]))
    damaged = text[:at] + damage + text[at + data.draw(st.integers(0, 30)) :]

    def events(pieces: list[str]) -> list[tuple[str, str]]:
        parser = Parser(lambda reader: BY_NAME[name].parse(reader, TOOLS))
        joined: list[tuple[str, str]] = []
        for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
            kind, value = type(event).__name__, event.name if isinstance(event, CallStart) else event.text
            if joined and joined[-1][0] == kind != "CallStart":
                joined[-1] = (kind, joined[-1][1] + value)
            elif value or kind == "CallStart":
                joined.append((kind, value))
        return joined

    assert events(list(damaged)) == events([damaged])


@pytest.mark.parametrize(
    "name", sorted(set(SAMPLES) - {"harmony", "inkling", "muse", "solar"})
)  # whose messages have heads
def test_text_where_a_call_should_be_is_shown(name: str) -> None:
    """It may be all that the model said. Some formats take it for a name."""
    begin, *others = BY_NAME[name].markers
    for end in ("", begin, *others):
        parser = Parser(lambda reader: BY_NAME[name].parse(reader, TOOLS))
        events = parser.push(f"{begin}I cannot. {end}") + parser.finish()
        told = [event.name if isinstance(event, CallStart) else event.text for event in events]
        assert "I cannot." in "".join(told), end


def test_arguments_stream_before_the_call_ends() -> None:
    text = SAMPLES["hermes"]
    for name in ("hermes", "qwen_xml", "glm", "deepseek", "mistral", "harmony", "llama", "lfm2", "gemma"):
        text = SAMPLES[name]
        parser = Parser(lambda reader: BY_NAME[name].parse(reader, TOOLS))  # noqa: B023
        events = parser.push(text[: text.index("West")])
        assert any(isinstance(event, CallStart) for event in events), name
        streamed = "".join(event.text for event in events if isinstance(event, CallArguments))
        assert "Zürich" in streamed, name


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("special", [False, True])
def test_the_grammar_admits_well_formed_calls_and_no_others(name: str, special: bool, tmp_path: Path) -> None:
    format = BY_NAME[name]
    tokenizer = byte_tokenizer(tmp_path, [m for m in format.markers if m.startswith(("<", "["))] if special else [])
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    lark = grammars.calls(format, TOOLS, required=True, parallel=True)
    assert lark is not None
    text = SAMPLES[name]

    def accepted(text: str) -> bool:
        grammar = grammars.compile(lark, "tools")
        for token in tokenizer.encode(text, add_special_tokens=False):
            allowed = grammar.allowed()
            if allowed is not None and not allowed[token]:
                return False
            grammar.accept(token)
        return grammar.complete

    # Between two calls harmony begins another message, which a grammar of one message does not hold.
    assert accepted(text.split("<|call|>")[0] if name == "harmony" else text)
    assert not accepted(text.replace("get_weather", "get_whether"))
    if '"days": 3' in text:
        assert not accepted(text.replace('"days": 3', '"days": "three"'))
    else:
        assert not accepted(text.replace("3", "three", 1))


@pytest.mark.parametrize("name", sorted(set(SAMPLES) - EITHER))
@pytest.mark.parametrize("special", [False, True])
def test_text_may_come_before_calls_that_are_not_required(name: str, special: bool, tmp_path: Path) -> None:
    format = BY_NAME[name]
    tokenizer = byte_tokenizer(tmp_path, [m for m in format.markers if m.startswith(("<", "["))] if special else [])
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    lark = grammars.calls(format, TOOLS, required=False, parallel=True)
    if lark is None:
        pytest.skip("this format has no marker where it is no special token")
    for text, right in (("Hello <there>.", True), (SAMPLES[name].replace("get_weather", "x"), False)):
        grammar = grammars.compile(lark, "tools")
        tokens = tokenizer.encode("Well: " + text, add_special_tokens=False)
        walked = 0
        for token in tokens:
            allowed = grammar.allowed()
            if allowed is not None and not allowed[token]:
                break
            grammar.accept(token)
            walked += 1
        assert (walked == len(tokens)) == right
    grammar = grammars.compile(lark, "tools")
    for token in tokenizer.encode("Well: " + SAMPLES[name], add_special_tokens=False):
        allowed = grammar.allowed()
        assert allowed is None or allowed[token]
        grammar.accept(token)
    assert grammar.complete


def grammar_tokenizer(name: str, special: bool, folder: Path) -> Tokenizer:
    markers = BY_NAME[name].markers
    return byte_tokenizer(folder, [m for m in markers if m.startswith(("<", "["))] if special else [])


def sensible(name: str, arguments: object) -> bool:
    """Whether the arguments of a call fit the schema of its tool."""
    if name == "now":
        return isinstance(arguments, dict)
    return (
        name == "get_weather"
        and isinstance(arguments, dict)
        and set(arguments) <= {"city", "days"}
        and isinstance(arguments.get("city"), str)
        and isinstance(arguments.get("days", 0), int)
    )


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("special", [False, True])
def test_an_answer_with_strict_tools_is_text_or_calls_that_fit(
    name: str, special: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What a model says under the grammar of `auto`: what it likes, as far as that is allowed."""
    format = BY_NAME[name]
    tokenizer = grammar_tokenizer(name, special, tmp_path_factory.mktemp("tokenizer"))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    lark = grammars.calls(format, TOOLS, required=False, parallel=True)
    assert lark is not None
    sample = SAMPLES[name].removesuffix("<|call|>")
    if name == "harmony":
        sample = sample.replace("<|call|>", "<|end|>")

    def said(likes: str) -> tuple[str, bool]:
        """(the text, whether it may end there) of a model that likes to say this, and skips what it may not."""
        grammar, text = grammars.compile(lark, "tools"), ""
        for token in tokenizer.encode(likes, add_special_tokens=False):
            allowed = grammar.allowed()
            if grammar.ended or (allowed is not None and not allowed[token]):
                continue
            grammar.accept(token)
            text += likes_of(token)
        return text, grammar.complete

    def likes_of(token: int) -> str:
        return raw.decode("latin-1") if not (raw := grammars.token_bytes(token)).startswith(b"<|im") else ""

    def fits(text: str) -> None:
        answer = parsed(name, [text.encode("latin-1").decode("utf-8", "replace")])
        assert all(sensible(*call) for call in answer.calls), answer

    text, complete = said(sample)
    assert complete
    assert text.encode("latin-1").decode() == sample
    assert parsed(name, [sample]).calls == EXPECTED

    @settings(max_examples=40, deadline=None, database=None)
    @given(data=st.data())
    def whatever(data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(sample)))
        damage = data.draw(st.sampled_from(["", "}", '"', "<", "\n", "{", "[", ",", "x", "null", " ", "now"]))
        damaged = sample[:at] + damage + sample[at + data.draw(st.integers(0, 30)) :]
        text, complete = said(damaged)
        if complete:
            fits(text)

    whatever()


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("special", [False, True])
def test_an_answer_that_may_call_nothing_is_any_text_but_calls(name: str, special: bool, tmp_path: Path) -> None:
    tokenizer = grammar_tokenizer(name, special, tmp_path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    lark = grammars.no_calls(BY_NAME[name], TOOLS)
    head = "".join(map(json.loads, re.findall(r'"(?:[^"\\]|\\.)*"', BY_NAME[name].head(json.dumps))))
    for text, right in ((head, True), (head + 'Is 3 < 4? [1] "é"\n\n{}', True), (head + SAMPLES[name], False)):
        grammar, walked = grammars.compile(lark, "tools"), True
        for token in tokenizer.encode(text, add_special_tokens=False):
            allowed = grammar.allowed()
            walked = walked and (allowed is None or bool(allowed[token]))
            if walked:
                grammar.accept(token)
        assert (walked and grammar.complete) == right, text


def test_answers_beside_strict_tools_of_llama_may_be_any_text_and_other_json(tmp_path: Path) -> None:
    tokenizer = grammar_tokenizer("llama", False, tmp_path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    lark = grammars.calls(BY_NAME["llama"], TOOLS, required=False, parallel=True)
    assert lark is not None
    good = ["Well.", "", '{"a": 1}', '{"name": "Ann"}', 'So: {"name": "now"}', '{"name": "now", "parameters": {}}']
    bad = ['{"name": "now", "x": 1}', ' {"name" : "now"', '{"type": "function", "name": "now"}', '{"name": "now"} then']
    for text in [*good, *bad]:
        grammar, walked = grammars.compile(lark, "tools"), True
        for token in tokenizer.encode(text, add_special_tokens=False):
            allowed = grammar.allowed()
            walked = walked and (allowed is None or bool(allowed[token]))
            if walked:
                grammar.accept(token)
        assert (walked and grammar.complete) == (text in good), text


def test_formats_are_told_by_their_templates() -> None:
    assert format_of("{{ '<tool_call>' }} <function=a> <parameter=b>").name == "qwen_xml"  # type: ignore[union-attr]
    assert format_of('{{ "<tool_call>" }}').name == "hermes"  # type: ignore[union-attr]
    assert format_of("[TOOL_CALLS] {{ x }}[ARGS]").name == "mistral"  # type: ignore[union-attr]
    assert format_of("<|tool_call|> <|/tool_call|>").name == "phi"  # type: ignore[union-attr]
    assert format_of("{{ messages }}") is None
    assert format_of(None) is None


# What models write that the grammar would not: quotes and words of Python, positions instead of names, JSON, bare text.
LOOSE = {
    "lfm2": [
        ("[get_weather(city='It\\'s \\u00fc\\n', days=3)]", {"city": "It's ü\n", "days": 3}),
        ('[get_weather("Rome", 3)]', {"city": "Rome", "days": 3}),
        ('[{"name": "get_weather", "arguments": {"city": "Rome"}}]', {"city": "Rome"}),
        (
            "[get_weather(city=Rome, x=[True, None, {'a': -1.5e3}])]",
            {"city": "Rome", "x": [True, None, {"a": -1500.0}]},
        ),
        ("[get_weather(city=00501)]", {"city": "00501"}),
    ],
    "olmo3": [
        ("get_weather(city='Rome', days=3)\n", {"city": "Rome", "days": 3}),
        (
            "\nget_weather(city='Rome', x=[true, None, {'a': False}])\n",
            {"city": "Rome", "x": [True, None, {"a": False}]},
        ),
    ],
    "gemma": [
        ("call:get_weather{city:Rome,days:3}", {"city": "Rome", "days": 3}),
        (
            'call:get_weather{city:<|"|>a\\n<|"|>,x:[true,null,{a:-2,b:<|"|>c<|"|>}]}',
            {"city": "a\\n", "x": [True, None, {"a": -2, "b": "c"}]},
        ),
    ],
}


@pytest.mark.parametrize(("name", "inside", "arguments"), [(name, *one) for name in LOOSE for one in LOOSE[name]])
def test_calls_in_loose_notation_are_read(name: str, inside: str, arguments: object) -> None:
    begin, end = BY_NAME[name].markers[:2]
    for pieces in ([begin + inside + end], list(begin + inside + end)):
        assert parsed(name, pieces).calls == [("get_weather", arguments)]


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=8)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.floats(-9, 9) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("name", sorted(LOOSE))
@settings(max_examples=60, deadline=None)
@given(given_arguments=st.dictionaries(KEYS, VALUES, max_size=3), size=st.integers(1, 9))
def test_written_calls_are_read_back(name: str, given_arguments: dict[str, object], size: int) -> None:
    text = BY_NAME[name].written([("send", json.dumps(given_arguments)), ("now", "{}")])
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parsed(name, pieces).calls == [("send", given_arguments), ("now", {})]


def schema_of(value: object) -> dict[str, object]:
    """A schema that a value fits."""
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {key: schema_of(one) for key, one in value.items()},
            "required": [*value],
        }
    if isinstance(value, list):
        return {"type": "array", "items": {"anyOf": [schema_of(one) for one in value]} if value else {}}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return {"type": kinds[type(value)]}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", sorted(LOOSE))
def test_the_grammar_follows_nested_schemas(name: str, special: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    format = BY_NAME[name]
    tokenizer = grammar_tokenizer(name, special, tmp_path_factory.mktemp("tokenizer"))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)

    @settings(max_examples=25, deadline=None, database=None)
    @given(arguments=st.dictionaries(KEYS, VALUES, min_size=1, max_size=3))
    def check(arguments: dict[str, object]) -> None:
        lark = grammars.calls(format, [Tool("send", "", schema_of(arguments))], required=True, parallel=False)
        assert lark is not None
        for text, right in ((json.dumps(arguments), True), (json.dumps({**arguments, "zz": 1}), "zz" in arguments)):
            grammar, walked = grammars.compile(lark, "tools"), True
            for token in tokenizer.encode(format.written([("send", text)]), add_special_tokens=False):
                allowed = grammar.allowed()
                walked = walked and (allowed is None or bool(allowed[token]))
                if walked:
                    grammar.accept(token)
            assert (walked and grammar.complete) == right, (text, lark)

    check()
    node: dict[str, object] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    endless = Tool("send", "", {"type": "object", "properties": {"a": node}, "$defs": {"node": node}})
    assert grammars.calls(format, [endless], required=True, parallel=True)
