"""What the clients of the server's page send, as their sources have it, is answered as they read it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import lmstate
from lmstate.engine import Engine
from lmstate.serve import Settings, anthropic
from lmstate.serve.wire.body import read
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.schema.messages import CountBody
from tests.serve.running import Running, events, running

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def server(tiny_model: lmstate.Model) -> Iterator[Running]:
    settings = Settings("tiny", port=0, aliases=("*",), max_new_tokens=8)
    with Engine(tiny_model, rows=2) as engine, running(engine, settings) as server:
        yield server


def test_codex(server: Running) -> None:
    """Responses only, nothing stored, kinds of tools that run elsewhere among its own, fields that nobody else has."""
    function = {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SCHEMA}
    others = [{"type": kind} for kind in ("web_search", "local_shell", "image_generation", "tool_search")]
    custom = {
        "type": "custom",
        "name": "apply_patch",
        "description": "d",
        "format": {"type": "grammar", "syntax": "lark"},
    }
    shell = {"type": "exec", "command": ["ls"], "env": {}}
    said = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": '{"path":"."}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done!"},
        {"type": "local_shell_call", "call_id": "call_3", "status": "completed", "action": shell},
        {"type": "function_call_output", "call_id": "call_3", "output": [{"type": "input_text", "text": "a.py"}]},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
    ]
    body = {
        "model": "gpt-5-codex",
        "instructions": "You are Codex.",
        "input": said,
        "tools": [function, custom, *others],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x": "y"},
        "text": {"verbosity": "low"},
        "max_output_tokens": 6,
    }
    with server.client(headers={"authorization": "Bearer none", "originator": "codex_cli_rs"}) as client:
        answer = client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        told = events(answer.text)
        assert all(name == data["type"] for name, data in told)
        assert told[0][0] == "response.created"
        assert told[-1][0] in ("response.completed", "response.incomplete")
        assert told[-1][1]["response"]["usage"]["total_tokens"] > 0
        assert any(name == "response.output_item.done" for name, _ in told)
        names = [tool["name"] for tool in told[-1][1]["response"]["tools"]]
        assert names == ["shell", "apply_patch"]
        assert "models" in client.get("/v1/models").json()
        # A long conversation is made short, and gone on with.
        made = client.post("/v1/responses/compact", json={"model": "gpt-5-codex", "input": said, "instructions": "x"})
        assert made.status_code == 200, made.text
        output = made.json()["output"]
        assert [item["type"] for item in output] == ["message", "compaction"]
        more = [*output, {"role": "user", "content": [{"type": "input_text", "text": "Go on."}]}]
        assert client.post("/v1/responses", json={**body, "input": more}).status_code == 200
        foreign = {"type": "compaction", "encrypted_content": "gAAAAB"}
        refused = client.post("/v1/responses", json={**body, "input": [foreign, *more]})
        assert refused.status_code == 400
        assert "not made by this server" in refused.json()["error"]["message"]


def test_claude_code(server: Running) -> None:
    """Messages with a query, betas, cache marks, and a header line that changes; its count of tokens."""
    tool = {"name": "Read", "description": "Reads.", "input_schema": {**SCHEMA, "$schema": "x"}, **EPHEMERAL}
    use = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.py"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "x"}], **EPHEMERAL}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "lmstate"}
    body = {
        "model": "claude-opus-4-5-20251101",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=abc;"},
            {"type": "text", "text": "You are Claude Code.", **EPHEMERAL},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Read a.py", **EPHEMERAL}]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I read it."}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ],
        "tools": [tool, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_1"},
        "temperature": 0,
    }
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    with server.client(headers=headers) as client:
        answer = client.post("/v1/messages?beta=true", json={**body, "max_tokens": 8})
        assert answer.status_code == 200, answer.text
        names = [name for name, _ in events(answer.text)]
        assert names[0] == "message_start"
        assert names[-2:] == ["message_delta", "message_stop"]
        assert client.post("/v1/messages", json={**body, "stream": False}).status_code == 200
        counted = {key: body[key] for key in ("model", "system", "messages", "tools", "thinking")}
        assert client.post("/v1/messages/count_tokens?beta=true", json=counted).json()["input_tokens"] > 0


def test_what_a_provider_ran_itself_is_left_out_and_its_texts_are_read() -> None:
    """Histories of clients that changed servers in between; documents, search results and tools found by name."""
    searched = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "web_search_result"}]},
        {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "n", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "content": []},
        {"type": "text", "text": "It is 5."},
        {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {}},
    ]
    found = [
        {"type": "tool_reference", "tool_name": "Read"},
        {"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "x"}]},
    ]
    document = {"type": "document", "title": "D", "source": {"type": "text", "media_type": "text/plain", "data": "y"}}
    given = [
        {"role": "user", "content": [document, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": searched},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": found}]},
    ]
    told = anthropic.read_chat(read({"messages": given}, CountBody))[0].messages
    assert [message.content for message in told] == ["D\ny\n?", "It is 5.", "Read\nT\ns\nx"]
    assert [call.name for call in told[1].calls] == ["find"]
    for bad in ({**document, "source": {"type": "url", "url": "u"}}, {"type": "audio"}, searched[0]):
        with pytest.raises(ApiError, match=r"messages\[0\].content\[0\] is of type"):
            anthropic.read_chat(read({"messages": [{"role": "user", "content": [bad]}]}, CountBody))


def test_open_webui_and_aider(server: Running) -> None:
    """The models without `/v1` in some settings; chat as OpenAI's and litellm's libraries send it."""
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]}]
    with server.client(headers={"authorization": "Bearer any"}) as client:
        assert client.get("/models").json()["data"][0]["id"] == "tiny"
        for more in ({"stream": True, "stream_options": {"include_usage": True}}, {"temperature": 0, "user": "u"}):
            body = {"model": "tiny", "messages": said, "max_tokens": 4, "metadata": {"chat_id": "1"}, **more}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            if "stream" in more:
                assert events(answer.text)[-1][1] == "[DONE]"
                assert events(answer.text)[-2][1]["usage"]["completion_tokens"] > 0


def test_lm_eval(server: Running) -> None:
    """Prompts of ids that are scored: it reads `token_logprobs[context:-1]` and the best of `top_logprobs`."""
    prompts = [[72, 101, 108, 108, 111], [72, 105]]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    body["temperature"] = 0
    with server.client() as client:
        choices = client.post("/v1/completions", json=body).json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        for prompt, choice in zip(prompts, choices, strict=True):
            told = choice["logprobs"]
            assert len(told["token_logprobs"]) == len(prompt) + 1
            for logprob, top in zip(told["token_logprobs"][1:-1], told["top_logprobs"][1:-1], strict=True):
                assert logprob <= max(top.values()) + 1e-6
        info = client.get("/tokenizer_info").json()
        assert info["eos_token"] == "<|im_end|>"
        props = client.get("/props").json()
        assert [props[key] for key in ("eos_token", "chat_template")] == [info["eos_token"], info["chat_template"]]
        assert props["default_generation_settings"]["n_ctx"] == info["model_max_length"]
        assert props["total_slots"] == server.engine.rows == 2
        tokens = client.post("/tokenize", json={"prompt": "Hi", "add_special_tokens": False}).json()["tokens"]
        assert tokens == server.engine.model.tokenizer.encode("Hi", add_special_tokens=False)


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat completions": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q"}], "max_tokens": 2}),
    "completions": ("/v1/completions", {"prompt": "q", "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": "q", "max_output_tokens": 2}),
    "messages": ("/v1/messages", {"model": "m", "messages": [{"role": "user", "content": "q"}], "max_tokens": 2}),
    "embeddings": ("/v1/embeddings", {"input": "q"}),
}


@pytest.mark.parametrize("protocol", BODIES)
def test_fields_that_the_page_says_are_ignored_change_nothing(server: Running, protocol: str) -> None:
    row = re.search(rf"^\| {protocol} \|(.*)$", PAGE.read_text(encoding="utf-8").split("## Fields")[1], re.M)
    assert row is not None
    names = re.findall(r"`([a-z_.]+)`", row[1].split("|")[1])
    assert names
    path, body = BODIES[protocol]
    ignored: dict[str, Any] = {}
    for name in names:
        outer, _, inner = name.partition(".")
        ignored.setdefault(outer, {})
        ignored[outer] |= {inner or "x": {"y": [1, "z"]}}
    with server.client() as client:
        plain, told = (client.post(path, json={**body, **more}) for more in ({}, ignored))
        assert told.status_code == 200, told.text
        said = [answer.json() for answer in (plain, told)]
        for key in ("choices", "data", "content"):
            assert said[0].get(key) == said[1].get(key)


def test_every_endpoint_of_openais_library_passes_its_strict_validation(server: Running) -> None:
    settings: Any = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    asked: Any = {"model": "gpt-any", "max_tokens": 4}
    with openai.OpenAI(**settings, _strict_response_validation=True) as client:
        assert client.models.list().data
        assert client.models.retrieve("tiny").id == "tiny"
        assert client.completions.create(prompt=["a", "b"], logprobs=1, **asked).usage
        said: Any = [{"role": "user", "content": "Hi"}]
        assert client.chat.completions.create(messages=said, logprobs=True, top_logprobs=2, n=2, **asked).usage
        stream = client.chat.completions.create(messages=said, stream=True, logprobs=True, top_logprobs=2, **asked)
        assert list(stream)
        assert client.embeddings.create(model="tiny", input="a", encoding_format="float").data[0].embedding
        response = client.responses.create(input="Hi", model="tiny", max_output_tokens=4, top_logprobs=2)
        assert client.responses.retrieve(response.id).id == response.id
        assert client.responses.input_items.list(response.id).data
        assert client.responses.input_tokens.count(input="Hi", model="tiny").input_tokens > 0
        assert list(client.responses.create(input="Hi", model="tiny", max_output_tokens=4, top_logprobs=2, stream=True))
        client.responses.delete(response.id)
    # The library's types have no chunk of a completion that goes on, whose finish_reason is null.
    with openai.OpenAI(**settings) as client:
        assert list(client.completions.create(prompt="a", stream=True, stream_options={"include_usage": True}, **asked))
