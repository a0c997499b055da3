"""Text, reasoning and calls of an answer, in the order and the form in which each protocol tells of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from lmstate.engine import Engine, TokenLogprob
from lmstate.serve import Settings
from lmstate.serve.answer.answers import UntoldTokens
from lmstate.serve.anthropic import whole_values
from lmstate.serve.tools import CallArguments, Reasoning, Text
from tests.serve.byte_tokenizer import TEMPLATE
from tests.serve.running import Running, events, load_tiny, running, saying

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "Go."}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BODIES: dict[str, Any] = {
    RESPONSES: {"input": USER, "max_output_tokens": 300, "tools": [{"type": "function", "name": "f"}]},
    MESSAGES: {
        "model": "tiny",
        "messages": USER,
        "max_tokens": 300,
        "tools": [{"name": "f", "input_schema": SCHEMA}],
    },
}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that thinks aloud."""
    model = load_tiny(tmp_path_factory.mktemp("thinking"), template="{# <think> </think> #}" + TEMPLATE)
    with Engine(model, rows=2) as engine, running(engine, Settings("tiny", port=0)) as server:
        yield server


@pytest.fixture
def says(thinking: Running) -> Iterator[Callable[..., Any]]:
    """Ask for an answer that is this text: what a model would say by itself."""

    def ask(path: str, text: str, **more: Any) -> httpx.Response:
        with saying(thinking, text):
            answer = client.post(path, json={**BODIES[path], **more})
        assert answer.status_code == 200, answer.text
        return answer

    with thinking.client() as client:
        yield ask


ANSWERS = {
    "text first": (f"Well.\n{CALL}", ["text", "call"]),
    "call first": (f"{CALL}\nThen.", ["call", "text"]),
    "between": (f"<think>Hm.</think>\n\nOne.{CALL}\nTwo.{CALL}\nThree.", ["think", *["text", "call"] * 2, "text"]),
    "thought alone": ("<think>Hm.</think>", ["think"]),
    "nothing but calls": (f"{CALL}\n{CALL}", ["call", "call"]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_parts_of_an_answer_come_in_its_order_streamed_or_not(says: Callable[..., Any], name: str) -> None:
    text, order = ANSWERS[name]
    kinds = {"message": "text", "function_call": "call", "reasoning": "think", "tool_use": "call", "thinking": "think"}

    def shown(parts: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        keys = ("text", "thinking", "content", "arguments", "input", "status")
        return [(kinds.get(part["type"], part["type"]), *map(part.get, keys)) for part in parts]

    first = says(RESPONSES, text).json()
    whole = first["output"]
    streamed = events(says(RESPONSES, text, stream=True).text)[-1][1]["response"]["output"]
    assert shown(whole) == shown(streamed)
    assert [kind for kind, *_ in shown(whole)] == order
    # Sent back, they are the one answer that they were.
    result = {"type": "function_call_output", "output": "1"}
    new = [{**result, "call_id": item["call_id"]} for item in whole if item["type"] == "function_call"] + USER
    after = says(RESPONSES, "So.", previous_response_id=first["id"], input=new).json()["usage"]["input_tokens"]
    assert says(RESPONSES, "So.", input=[*USER, *whole, *new]).json()["usage"]["input_tokens"] == after
    blocks = says(MESSAGES, text).json()["content"]
    assert [kind for kind, *_ in shown(blocks)] == order
    started = [data["content_block"] for kind, data in events(says(MESSAGES, text, stream=True).text)
               if kind == "content_block_start"]  # fmt: skip
    assert [kinds.get(block["type"], block["type"]) for block in started] == order


@pytest.mark.parametrize("name", ANSWERS)
def test_the_logprobs_of_a_response_are_those_of_the_tokens_of_its_texts(says: Callable[..., Any], name: str) -> None:
    text, _ = ANSWERS[name]
    text = text.replace("Well", "Wéll<t")
    asked = {"include": ["message.output_text.logprobs"]}
    whole = says(RESPONSES, text, **asked).json()["output"]
    told = [data for _, data in events(says(RESPONSES, text, **asked, stream=True).text)]
    done = [data for data in told if data["type"] == "response.output_text.done"]
    parts = [part for item in whole if item["type"] == "message" for part in item["content"]]
    assert [part["logprobs"] for part in parts] == [data["logprobs"] for data in done]
    assert [part["text"] for part in parts] == [data["text"] for data in done]
    for part, data in zip(parts, done):
        assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode() == part["text"]
        deltas = [one for one in told if one["type"].endswith("text.delta") and one["item_id"] == data["item_id"]]
        assert [one for delta in deltas for one in delta["logprobs"]] == part["logprobs"]
        for delta in deltas:  # what a delta tells of is its own text
            assert b"".join(bytes(one["bytes"]) for one in delta["logprobs"]).decode() == delta["delta"]


def test_tokens_that_several_parts_share_are_told_of_with_each_text_once() -> None:
    untold, tokens = UntoldTokens(), [TokenLogprob(number, -1.0) for number in range(4)]
    untold.push("Hm.</think>One", tokens[0])
    assert untold.take(Reasoning("Hm.")) == tokens[:1]
    assert untold.take(Text("One")) == tokens[:1]
    untold.push(" two<", tokens[1])
    assert untold.take(Text(" two")) == tokens[1:2]
    untold.push("tool", tokens[2])
    assert untold.take(Text("<tool")) == tokens[2:3]
    untold.push("{'a': 1}.", tokens[3])
    assert untold.take(CallArguments('{"a": 1}')) == tokens[3:]


def test_a_stop_string_has_no_logprobs_in_a_response(says: Callable[..., Any]) -> None:
    asked = {"include": ["message.output_text.logprobs"], "stop": ["END"]}
    (item,) = says(RESPONSES, "<think>Hm.</think>It is EN END now", **asked).json()["output"][1:]
    (part,) = item["content"]
    assert part["text"] == "".join(one["token"] for one in part["logprobs"]) == "It is EN "


def test_the_input_of_a_call_that_was_cut_off_is_what_the_library_reads_from_the_stream(
    thinking: Running, says: Callable[..., Any]
) -> None:
    arguments = {"a,[{": 'x\\"}', "b": {"c": ["y", [None, []]], "d": True, "é": "\n"}}
    call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    seen = []
    with anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0) as claude:
        for most in range(40, len(call) + 20, 3):
            text = f"<tool_call>\n{call}\n</tool_call>"
            message = says(MESSAGES, text, max_tokens=most).json()
            with saying(thinking, text), claude.messages.stream(**{**BODIES[MESSAGES], "max_tokens": most}) as stream:
                streamed = stream.get_final_message()
            assert [block["type"] for block in message["content"]] == ["tool_use"]
            seen.append(message["content"][0]["input"])
            assert seen[-1] == streamed.content[0].input  # type: ignore[union-attr]
            assert message["stop_reason"] == streamed.stop_reason
    assert seen[0] == {}
    assert {"a,[{": 'x\\"}', "b": {"c": ["y"]}} in seen
    assert seen[-1] == arguments
    assert whole_values('{"a": 1, "n": 12') == {"a": 1}  # which the library takes for 12, and may be 120
    assert whole_values("no JSON") == {}
