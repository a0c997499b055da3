"""Schemas as libraries write them, and answers with calls that were cut off: what a client may rely on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.running import Running, events

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "Tell me about rivers."}]
# Keywords that pydantic, zod and servers of tools write, and the grammars of llguidance lack.
SCHEMAS = {
    "set": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}},
    "path": {"type": "object", "properties": {"a": {"type": "string", "format": "path"}}},
    "record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "not": {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}},
    "one of": {"oneOf": [{"type": "object", "properties": {k: {"type": "string"}}} for k in "ab"]},
    "lookahead": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x)[a-z]+$"}}},
    "pattern": {"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}}},
}


def function(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_followed_as_far_as_it_can_be_unless_it_is_strict(tiny: Running, name: str) -> None:
    schema = SCHEMAS[name]
    body = {"messages": USER, "max_tokens": 3}
    with tiny.client() as client:

        def asked(**more: Any) -> tuple[int, str]:
            answer = client.post(CHAT, json={**body, **more})
            return answer.status_code, answer.text

        for strict, status in ((False, 200), (True, 400)):
            tools = [function("f", schema, strict=strict)]
            format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}
            for more in ({"tools": tools, "tool_choice": "required"}, {"response_format": format}):
                code, text = asked(**more)
                assert code == status, text
                assert status == 200 or "cannot be used as a constraint" in text
        assert asked(tools=[function("f", schema)], response_format={"type": "json_object"})[0] == 200
        named = {"name": "f", "input_schema": schema}
        told = client.post(MESSAGES, json={**body, "model": "tiny", "tools": [named], "tool_choice": {"type": "any"}})
        assert told.status_code == 200, told.text


def test_the_reason_of_a_refused_pattern_is_told(tiny: Running) -> None:
    with tiny.client() as client:
        answer = client.post(CHAT, json={"messages": USER, "guided_regex": "(?=a)b"})
    assert answer.status_code == 400
    assert "look-ahead" in answer.json()["error"]["message"]


@pytest.mark.parametrize("pattern", ["1/2", r"1\/2", r"[1]\/[2]", r"1[/]2"])
def test_slashes_of_a_pattern_may_be_escaped(tiny: Running, pattern: str) -> None:
    with tiny.client() as client:
        answer = client.post(CHAT, json={"messages": USER, "guided_regex": pattern})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "1/2"
        backslash = client.post(CHAT, json={"messages": USER, "guided_regex": r"\\/"})
        assert backslash.json()["choices"][0]["message"]["content"] == "\\/"


@pytest.mark.parametrize("text", ["<|im_start|>", "<|im_end|>", "a<|im_end|>b"])
def test_a_choice_may_be_written_like_a_control_token(tiny: Running, real: Running, text: str) -> None:
    for server in (tiny, real):
        with server.client() as client:
            for more in ({"guided_choice": [text]}, {"guided_choice": [text, f"{text}b"], "logprobs": True}):
                body = {"messages": USER, "max_tokens": 16, **more}
                choice = client.post(CHAT, json=body).json()["choices"][0]
                assert choice["message"]["content"].startswith(text)
                assert choice["finish_reason"] == "stop"
                again = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 16, **more, "logprobs": None})
                assert again.json()["choices"][0]["text"].startswith(text)


GRAMMARS = {
    "a rule that ends like start": 'restart: "yes" | "si"\nstart: restart',
    "a comment": '// start: here\nstart: "yes"',
    "a space": 'start : "yes"',
    "an attribute": 'start[capture]: "yes"',
    "names of ours": 'start: answered | called | call object\nanswered: "yes"\ncalled: "si"\ncall: "j"\nobject: "a"',
    "recursion": 'start: "y" start | "e" start | "s"',
    "braces": 'start: /[}]?/ rest // }\nrest: "yes" | "}"',
    "GBNF": 'root ::= object | call\nobject ::= "yes"\ncall ::= "si"',
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_is_taken_whatever_its_rules_are_called(tiny: Running, name: str) -> None:
    grammar = {"grammar": GRAMMARS[name], "max_tokens": 8}
    tools = [function("f", {"type": "object", "properties": {}})]
    with tiny.client() as client:
        for more in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"}):
            answer = client.post(CHAT, json={"messages": USER, **grammar, **more})
            assert answer.status_code == 200, answer.text
        answer = client.post("/v1/completions", json={"prompt": "a", **grammar})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object", "schema": {"enum": [{"a": 17}]}}},
        {"guided_json": '{"enum": [{"a": 17}]}'},
        {"structured_outputs": {"json": {"enum": [{"a": 17}]}}},
        {"json_schema": {"enum": [{"a": 17}]}},
        {"format": {"enum": [{"a": 17}]}},
        {"regex": '[{]"a": 17[}]'},
        {"ebnf": 'root ::= "{\\"a\\": 17}"'},
    ],
    ids=str,
)
def test_a_schema_is_found_wherever_local_servers_take_it(real: Running, more: dict[str, Any]) -> None:
    with real.client() as client:
        answer = client.post(CHAT, json={"messages": USER, "max_tokens": 30, **more}).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 17}


def test_any_json_object_by_the_name_that_vllm_has_for_it(real: Running) -> None:
    with real.client() as client:
        body = {"messages": USER, "max_tokens": 40, "structured_outputs": {"json_object": True}}
        answer = client.post(CHAT, json=body).json()
    assert answer["choices"][0]["message"]["content"].startswith("{")


CITY = {
    "type": "object",
    "properties": {"city": {"const": "New York"}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_stop_strings_end_no_call_that_is_required(real: Running) -> None:
    tool = {"name": "find", "description": "Finds.", "parameters": CITY}
    with real.client() as client:
        body = {"messages": USER, "max_tokens": 80, "stop": ["York", "\n"], "parallel_tool_calls": False}
        chat = client.post(CHAT, json={**body, "tools": [function(name="find", schema=CITY)],
                                       "tool_choice": "required"}).json()  # fmt: skip
        named = {"name": "find", "description": "Finds.", "input_schema": CITY}
        told = client.post(
            MESSAGES,
            json={
                "model": "smollm2", "messages": USER, "max_tokens": 80, "stop_sequences": ["York"], "tools": [named],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            },
        ).json()  # fmt: skip
    assert tool["name"] == chat["choices"][0]["message"]["tool_calls"][0]["function"]["name"]
    assert chat["choices"][0]["finish_reason"] == "tool_calls"
    assert json.loads(chat["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "New York"}
    assert told["stop_reason"] == "tool_use"
    assert [block["input"] for block in told["content"]] == [{"city": "New York"}]


@pytest.mark.parametrize("most", [*range(1, 40, 3), 60, 74, 76, 80])
def test_a_call_that_is_cut_off_is_told_as_such_and_is_never_text(real: Running, most: int) -> None:
    with real.client() as client:
        tools = [function("find", CITY)]
        chat = client.post(
            CHAT, json={"messages": USER, "max_tokens": most, "tools": tools, "tool_choice": "required"}
        ).json()["choices"][0]
        body = {
            "model": "smollm2", "input": USER, "max_output_tokens": most, "tool_choice": "required",
            "tools": [{"type": "function", "name": "find", "parameters": CITY}],
        }  # fmt: skip
        made = client.post(RESPONSES, json=body).json()
        streamed = events(client.post(RESPONSES, json={**body, "stream": True}).text)[-1][1]["response"]
    assert not chat["message"]["content"]
    assert chat["finish_reason"] in ("length", "tool_calls")

    def seen(response: dict[str, Any]) -> list[tuple[Any, ...]]:
        items = response["output"]
        return [(item["type"], item.get("arguments"), item.get("content"), item["status"]) for item in items]

    assert seen(made) == seen(streamed)
    *before, last = seen(made)
    assert all((kind, status) == ("function_call", "completed") for kind, _, _, status in before)
    assert all(json.loads(arguments) == {"city": "New York"} for _, arguments, _, _ in before)
    assert last[0] == "function_call" or not last[2][0]["text"]
    assert last[3] == made["status"]


def test_functions_of_a_namespace_are_called_and_answered_by_their_names_in_it(real: Running) -> None:
    inner = {"type": "function", "name": "find", "description": "Finds.", "parameters": CITY}
    space = {"type": "namespace", "name": "mcp__crm__", "description": "Customers.", "tools": [inner]}
    body: dict[str, Any] = {
        "model": "smollm2", "input": USER, "tools": [space], "tool_choice": "required", "parallel_tool_calls": False,
        "max_output_tokens": 80,
    }  # fmt: skip
    with real.client() as client:
        made = client.post(RESPONSES, json=body).json()
        assert made["tools"] == [space]
        [call] = made["output"]
        assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__crm__", "find")
        streamed = events(client.post(RESPONSES, json={**body, "stream": True}).text)
        added = next(data["item"] for name, data in streamed if name == "response.output_item.added")
        assert (added["namespace"], added["name"]) == ("mcp__crm__", "find")
        chosen = {"type": "function", "namespace": "mcp__crm__", "name": "find"}
        assert client.post(RESPONSES, json={**body, "tool_choice": chosen}).json()["output"][0]["name"] == "find"
        # Sent back, the call is the one that was sampled: its tokens are found.
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "found"}
        again = client.post(RESPONSES, json={**body, "input": [*USER, call, output], "tool_choice": "auto"}).json()
        assert again["usage"]["input_tokens_details"]["cached_tokens"] >= made["usage"]["input_tokens"]


def test_parts_of_a_text_are_lines_of_their_own(tiny: Running) -> None:
    def counted(content: Any) -> int:
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        return int(client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    parts = [{"type": "text", "text": "1000"}, {"type": "text", "text": "2000"}]
    with tiny.client() as client:
        assert counted(parts) == counted("1000\n2000")
        result = [{"type": "tool_result", "tool_use_id": "t", "content": parts}]
        whole = [{"type": "tool_result", "tool_use_id": "t", "content": "1000\n2000"}]
        assert counted(result) == counted(whole)
        chats = [{"messages": [{"role": "user", "content": said}], "max_tokens": 1} for said in (parts, "1000\n2000")]
        first, second = (client.post(CHAT, json=chat).json()["usage"]["prompt_tokens"] for chat in chats)
        assert first == second


@pytest.mark.parametrize("path", [CHAT, "/apply-template"])
def test_an_answer_of_null_is_an_empty_text(tiny: Running, path: str) -> None:
    def said(**answer: Any) -> Any:
        body = {"messages": [*USER, {"role": "assistant", **answer}, *USER], "max_tokens": 3}
        answered = client.post(path, json=body)
        assert answered.status_code == 200, answered.text
        return answered.json()["choices"] if path == CHAT else answered.json()

    with tiny.client() as client:
        assert said(content=None) == said(content="") == said(content=[]) == said()
        for role in ("system", "user"):
            refused = client.post(path, json={"messages": [*USER, {"role": role, "content": None}]})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages[1].content"


def test_a_stream_tells_no_tokens_after_the_call_that_it_ends_with(tiny: Running) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    body = {
        "messages": USER,
        "max_tokens": 300,
        "n": 2,
        "grammar": f"start: {json.dumps(call * 4)}",
        "tools": [function("f", {"type": "object", "properties": {}})],
        "parallel_tool_calls": False,
        "logprobs": True,
        "return_token_ids": True,
    }
    with tiny.client() as client:
        whole = client.post(CHAT, json=body).json()["choices"]
        parts = [part for _, part in events(client.post(CHAT, json={**body, "stream": True}).text) if part != "[DONE]"]
    for choice in whole:
        assert choice["finish_reason"] == "tool_calls"
        told = [one for part in parts for one in part["choices"] if one["index"] == choice["index"]]
        assert [one["finish_reason"] for one in told][-1] == "tool_calls"
        assert [id for one in told for id in one["token_ids"]] == choice["token_ids"]
        logprobs = [entry for one in told if one.get("logprobs") for entry in one["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
