"""Whatever comes in, a client is told what was wrong with it: never a 500, a hang, or another protocol's error."""

from __future__ import annotations

import gzip
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmstate.engine import Engine
from lmstate.serve import Settings
from tests.serve.byte_tokenizer import TEMPLATE
from tests.serve.running import Running, load_tiny, running
from tests.waiting import GUARD, wait_until

USER = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "repetition_penalty": 1.1}
OPENAI = {
    **SAMPLING,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"65": 1.5},
    "stop": ["\n\n"],
    "n": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **OPENAI,
        "model": "tiny",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                    {"id": "d", "type": "custom", "custom": {"name": "g", "input": "i"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "max_tokens": 2,
        "max_completion_tokens": 2,
        "logprobs": True,
        "top_logprobs": 1,
        "tools": [
            {"type": "function", "function": FUNCTION},
            {
                "type": "custom",
                "custom": {
                    "name": "g",
                    "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x/"}},
                },
            },
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "reasoning_effort": "low",
        "chat_template_kwargs": {"x": 1},
    },
    "/v1/completions": {
        **OPENAI,
        "model": "tiny",
        "prompt": "ab",
        "max_tokens": 2,
        "echo": True,
        "logprobs": 1,
        "best_of": 1,
        "suffix": None,
    },
    "/v1/responses": {
        "model": "tiny",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "i"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "r"},
            {"type": "local_shell_call", "call_id": "e", "status": "completed", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "e", "output": "r"},
            {"type": "mcp_call", "id": "m", "name": "h", "arguments": "{}"},
            {"type": "compaction", "encrypted_content": "lmstate1.cw=="},
        ],
        "instructions": "i",
        "previous_response_id": None,
        "max_output_tokens": 2,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "tools": [
            {"type": "function", **FUNCTION},
            {
                "type": "custom",
                "name": "g",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
            },
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "include": ["message.output_text.logprobs"],
        "store": False,
        "stream": False,
        **SAMPLING,
    },
    "/v1/responses/compact": {
        "model": "tiny",
        "input": [{"type": "message", "role": "user", "content": "x"}],
        "instructions": "i",
        "previous_response_id": None,
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "thinking": {"type": "disabled"},
        "stream": False,
        **SAMPLING,
    },
    "/v1/messages/count_tokens": {"model": "tiny", "messages": USER, "system": "s"},
    "/v1/embeddings": {
        "model": "tiny",
        "input": ["ab"],
        "encoding_format": "float",
        "dimensions": 4,
        "pooling": "mean",
    },
    "/tokenize": {"prompt": "ab", "add_special_tokens": True},
    "/detokenize": {"tokens": [65]},
    "/apply-template": {"messages": USER},
}
WRONG: list[Any] = [
    None, True, -1, 0, 3, 10**30, -(10**30), 10**400, 1.5, 1e308, "", "x", "\u0000", "y" * 3000, [], [[]], [None],
    [1, "a"], ["", ""], {}, {"a": {"b": []}}, {"type": "nonsense"}, [{}], [{"role": "user"}], [{"type": "function"}],
    [-1], [10**9],
]  # fmt: skip


def check(path: str, status: int, text: str) -> None:
    assert status < 500, f"{path} answered {status}: {text[:300]}"
    if status >= 400:
        body = json.loads(text)
        assert body["error"]["message"]
        assert (body.get("type") == "error") == ("/messages" in path)
        assert "Traceback" not in text


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_body_is_answered(tiny: Running, path: str) -> None:
    with tiny.client() as client:
        answer = client.post(path, json=BODIES[path])
        assert answer.status_code == 200, answer.text


def test_a_body_in_another_encoding_is_refused_as_such(tiny: Running) -> None:
    with tiny.client() as client:
        body = gzip.compress(json.dumps(BODIES["/v1/chat/completions"]).encode())
        for path in BODIES:
            answer = client.post(path, content=body, headers={"content-encoding": "gzip"})
            assert answer.status_code == 415, answer.text
            assert "gzip" in answer.json()["error"]["message"]
        plain = {"content-encoding": "identity"}
        assert client.post("/tokenize", json={"prompt": "a"}, headers=plain).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_wrong_fields_are_refused_or_harmless(tiny: Running, path: str) -> None:
    valid = BODIES[path]
    with tiny.client() as client:
        for key in valid:
            for value in WRONG:
                answer = client.post(path, json={**valid, key: value})
                check(path, answer.status_code, answer.text)
            answer = client.post(path, json={k: v for k, v in valid.items() if k != key})
            check(path, answer.status_code, answer.text)
    wait_until(lambda: not tiny.server.service.running)


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_are_no_objects_are_refused(tiny: Running, path: str) -> None:
    bodies = [
        b"", b"{", b"[]", b"null", b"1", b'"x"', b"{}", b"\xff\xfe", b'{"a": NaN}', b'{"prompt": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}', b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"n": ' + b"9" * 5000 + b"}", b'{"a": "' + b"x" * 2**20 + b'"}',
    ]  # fmt: skip
    with tiny.client() as client:
        for body in bodies:
            answer = client.post(path, content=body)
            check(path, answer.status_code, answer.text)
            assert answer.status_code >= 400 or (body == b"{}" and path == "/tokenize")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_values_anywhere_in_a_body_never_fail_the_server(tiny: Running, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(BODIES)))
    body = json.loads(json.dumps(BODIES[path]))
    at: Any = body
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            at[key] = data.draw(JSON)
            break
        at = at[key]
    with tiny.client() as client:
        answer = client.post(path, content=json.dumps(body).encode())  # an infinity is written, which is no JSON
        check(path, answer.status_code, answer.text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/nowhere"},
        {"$ref": "http://127.0.0.1/x"},
        {"type": "string", "pattern": "(((("},
        {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
        {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"not": {}},
        {"type": "object", "properties": {str(i): {"type": "string"} for i in range(3000)}},
        {"anyOf": [{"const": i} for i in range(3000)]},
        "text",
        7,
        [],
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_schemas_that_cannot_be_used_are_refused_in_bounded_time(tiny: Running, schema: Any) -> None:
    body = {"messages": USER, "max_tokens": 1}
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with tiny.client() as client:
        answer = client.post("/v1/chat/completions", json={**body, "response_format": format})
        check("/v1/chat/completions", answer.status_code, answer.text)
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        answer = client.post("/v1/chat/completions", json={**body, "tools": [tool], "tool_choice": "required"})
        check("/v1/chat/completions", answer.status_code, answer.text)


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LOOP = {"$ref": "#/nowhere"}


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("path", "tools", "choice", "field"),
    [
        (CHAT, [{"type": "function", "function": {}}], None, "tools[0].function.name"),
        (CHAT, [{"type": "function", "function": {"name": "a b"}}], None, "tools[0].function.name"),
        (CHAT, [{"type": "function"}], None, "tools[0].function"),
        (CHAT, [{"type": "custom"}], None, "tools[0].custom"),
        (CHAT, [{"type": "custom", "custom": {"name": 3}}], None, "tools[0].custom.name"),
        (
            CHAT,
            [{"type": "function", "function": {"name": "f", "parameters": 3}}],
            None,
            "tools[0].function.parameters",
        ),
        (CHAT, [{"type": "function", "function": {"name": "f", "strict": 3}}], None, "tools[0].function.strict"),
        (CHAT, [{"type": "function", "function": {"name": "f"}}] * 2, None, "tools[1].function.name"),
        (
            CHAT,
            [{"type": "mcp"}, *({"function": {"name": n, "parameters": p}} for n, p in (("f", SCHEMA), ("g", LOOP)))],
            "required",
            "tools[2].function.parameters",
        ),
        (
            CHAT,
            [{"type": "function", "function": {"name": "f", "strict": True, "parameters": nested(80)}}],
            None,
            "tools[0].function.parameters",
        ),
        (CHAT, [], {"type": "function", "function": {"name": "g"}}, "tool_choice.function.name"),
        (CHAT, [], {"type": "function", "function": {}}, "tool_choice.function.name"),
        (CHAT, [], {"type": "custom"}, "tool_choice.custom"),
        (CHAT, [], {"type": "nonsense"}, "tool_choice.type"),
        (RESPONSES, [{"type": "function"}], None, "tools[0].name"),
        (RESPONSES, [{"type": "custom", "name": ""}], None, "tools[0].name"),
        (RESPONSES, [{"type": "function", "name": "f", "parameters": LOOP}], "required", "tools[0].parameters"),
        (RESPONSES, [{"type": "function", "name": "f"}] * 2, None, "tools[1].name"),
        (RESPONSES, [], {"type": "function", "name": "g"}, "tool_choice.name"),
        (MESSAGES, [{"input_schema": SCHEMA}], None, "tools[0].name"),
        (MESSAGES, [{"name": "f"}], None, "tools[0].input_schema"),
        (MESSAGES, [{"name": "f", "input_schema": LOOP}], {"type": "any"}, "tools[0].input_schema"),
        (MESSAGES, [{"name": "f", "input_schema": SCHEMA}] * 2, None, "tools[1].name"),
        (MESSAGES, [], {"type": "tool", "name": "g"}, "tool_choice.name"),
    ],
)
def test_errors_about_tools_name_the_field_with_all_that_is_around_it(
    tiny: Running, path: str, tools: list[Any], choice: Any, field: str
) -> None:
    body = {"model": "tiny", "messages": USER, "input": "x", "tools": tools, "tool_choice": choice}
    with tiny.client() as client:
        answer = client.post(path, json=body if path != MESSAGES else {**body, "max_tokens": 1})
    assert answer.status_code == 400
    check(path, answer.status_code, answer.text)
    error = answer.json()["error"]
    assert error["message"].startswith(f"{field} ")
    assert error.get("param") == (None if path == MESSAGES else field)


@pytest.mark.parametrize("depth", [101, 900, 5000])
def test_arguments_of_a_call_that_are_nested_too_deep_are_a_text(tiny: Running, depth: int) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "[" * depth + "]" * depth}
    said = [call, {"type": "function_call_output", "call_id": "a", "output": "x"}]
    function = {"name": "f", "arguments": call["arguments"]}
    told = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    chat = {"messages": [*USER, told, {"role": "tool", "tool_call_id": "a", "content": "x"}], "max_tokens": 2}
    with tiny.client() as client:
        for path, body in (("/v1/chat/completions", chat), ("/v1/responses", {"input": said, "max_output_tokens": 2})):
            answer = client.post(path, json=body)
            check(path, answer.status_code, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_is_no_number_of_log_probabilities(tiny: Running, flag: bool) -> None:
    with tiny.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "logprobs": flag})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logprobs"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "prompt_logprobs", 0),
        ("/v1/completions", "prompt_logprobs", 1),
        ("/v1/chat/completions", "chat_template", "{{ messages }}"),
        ("/tokenize", "chat_template", "{{ messages }}"),
        ("/v1/chat/completions", "guided_choice", []),
        ("/v1/completions", "guided_choice", []),
        ("/v1/chat/completions", "structured_outputs.choice", []),
        ("/v1/completions", "structured_outputs.choice", []),
    ],
)
def test_what_would_change_the_answer_is_not_ignored(tiny: Running, path: str, field: str, value: Any) -> None:
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": USER}
    with tiny.client() as client:
        for given, status in ((value, 400), (None, 200)):
            outer, _, inner = field.partition(".")
            body = {**prompt, "max_tokens": 1, outer: {inner: given} if inner else given}
            answer = client.post(path, json=body)
            assert answer.status_code == status, answer.text
            assert status == 200 or answer.json()["error"]["param"] == field


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
@pytest.mark.parametrize("given", ["", [""], [{}]])
def test_errors_about_a_text_name_its_field(tiny: Running, path: str, field: str, given: Any) -> None:
    with tiny.client() as client:
        answer = client.post(path, json={"model": "tiny", field: given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_what_is_not_there_is_said_in_the_protocol_of_the_path(tiny: Running) -> None:
    with tiny.client() as client:
        for method, path, status in (
            ("GET", "/v1/nowhere", 404),
            ("GET", "/v1/chat/completions", 405),
            ("POST", "/v1/models", 405),
            ("GET", "/v1/messages", 405),
            ("GET", "/v1/models/other", 404),
            ("GET", "/v1/responses/none", 404),
            ("DELETE", "/v1/responses/none", 404),
        ):
            answer = client.request(method, path)
            assert answer.status_code == status
            check(path, answer.status_code, answer.text)
        answer = client.post("/v1/chat/completions", json={"messages": USER, "model": "other"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


def test_a_prompt_past_the_context_is_told_as_such(tiny: Running) -> None:
    with tiny.client() as client:
        body = {"messages": [{"role": "user", "content": "x" * 5000}]}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is" in answer.json()["error"]["message"]  # words that clients look for
        answer = client.post("/v1/messages", json={**body, "model": "tiny", "max_tokens": 5})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["message"].startswith("prompt is too long: ")


def test_variables_of_a_template_cannot_take_the_place_of_what_is_rendered(tiny: Running) -> None:
    with tiny.client() as client:
        plain = client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 3})
        variables = {"self": 1, "messages": [], "tools": 2, "add_generation_prompt": False, "given": 3}
        told = client.post(
            "/v1/chat/completions", json={"messages": USER, "max_tokens": 3, "chat_template_kwargs": variables}
        )
    assert told.status_code == 200, told.text
    assert told.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 200_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
    ids=range(6),
)
def test_broken_http_is_answered_or_closed(tiny: Running, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", tiny.server.port), timeout=GUARD) as connection:
        answer = b""
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                answer += piece
        except OSError as error:  # closed before all was sent
            assert not isinstance(error, TimeoutError)
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    wait_until(lambda: not tiny.server.service.running)


def test_a_body_may_begin_with_a_byte_order_mark(tiny: Running) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    with tiny.client() as client:
        assert client.post("/v1/completions", content=body.encode("utf-8-sig")).status_code == 200
        twice = client.post("/v1/completions", content=("\ufeff" + body).encode("utf-8-sig"))
    assert twice.status_code == 400
    assert twice.json()["error"]["code"] == "invalid_json"


def test_half_a_surrogate_pair_that_a_template_writes_is_the_fault_of_the_template(tmp_path: Path) -> None:
    model = load_tiny(tmp_path, template="{{ '\\ud800' }}" + TEMPLATE)
    with (
        Engine(model, rows=1) as engine,
        running(engine, Settings("tiny", port=0)) as server,
        server.client() as client,
    ):
        answer = client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1})
    assert answer.status_code == 400
    assert "chat template writes half a surrogate pair" in answer.json()["error"]["message"]
    with pytest.raises(ValueError, match="the text has half a surrogate pair"):  # this one is of the messages
        model.tokenizer.chat([{"role": "user", "content": "\ud800"}])


def test_a_body_of_two_lengths_ends_its_connection(tiny: Running) -> None:
    """A proxy that went by the other length would take the rest of it for the next request."""
    body = b'{"prompt": "a"}'
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n"
    with socket.create_connection(("127.0.0.1", tiny.server.port), timeout=GUARD) as connection:
        connection.sendall(
            head + b"%x\r\n%b\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" % (len(body), body)
        )
        answer = b""
        while piece := connection.recv(2**16):
            answer += piece
    assert answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer.lower()


def test_a_thread_is_refused_so_that_clients_send_all_of_it(tiny: Running) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="tiny", max_tokens=1, messages=USER, extra_body={"thread": {"type": "create"}})
    assert caught.value.error_code == "thread_unsupported_request"


def test_priorities_are_bounded(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    submit = tiny.engine.submit

    def told(prompt: Any, **options: Any) -> Any:
        asked.append(options["priority"])
        return submit(prompt, **options)

    monkeypatch.setattr(tiny.engine, "submit", told)
    with tiny.client() as client:
        for priority in (2**31, -3):
            body = {"prompt": "a", "max_tokens": 1, "priority": priority}
            assert client.post("/v1/completions", json=body).status_code == 200
    assert asked == [0, -3]
