"""Ollama's API, asked by Ollama's own Python client, says what the other protocols say."""

from __future__ import annotations

import functools
import json
from typing import Any

import ollama
import pytest
from typer.testing import CliRunner

from lmstate.cli.app import app
from lmstate.serve.answer.service import ToolUse
from tests.serve.running import Running

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
GREEDY = {"num_predict": 12, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["age"],
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}


@pytest.fixture
def client(tiny: Running) -> ollama.Client:
    return ollama.Client(host=tiny.url)


def chatted(server: Running, **fields: Any) -> dict[str, Any]:
    """The same conversation by OpenAI's protocol."""
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, **fields}
    with server.client() as client:
        return client.post("/v1/chat/completions", json=body).raise_for_status().json()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_a_chat_is_that_of_the_other_protocols(tiny: Running, client: ollama.Client, name: str) -> None:
    expected = chatted(tiny)
    whole = client.chat(name, MESSAGES, options=GREEDY)
    assert whole.message.content == expected["choices"][0]["message"]["content"] != ""
    assert (whole.done, whole.done_reason, whole.model) == (True, "length", name)
    assert (whole.prompt_eval_count, whole.eval_count) == (expected["usage"]["prompt_tokens"], 12)
    assert whole.total_duration >= whole.eval_duration > 0
    parts = list(client.chat(name, MESSAGES, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 12


def test_a_second_turn_feeds_only_what_is_new(tiny: Running, client: ollama.Client) -> None:
    first = client.chat("tiny", MESSAGES, options=GREEDY)
    messages = [*MESSAGES, first.message, {"role": "user", "content": "And more?"}]
    again = client.chat("tiny", messages, options=GREEDY)
    told = [*MESSAGES, {"role": "assistant", "content": first.message.content}, messages[-1]]
    usage = chatted(tiny, messages=told)["usage"]
    assert again.prompt_eval_count == usage["prompt_tokens"] > first.prompt_eval_count
    assert usage["prompt_tokens_details"]["cached_tokens"] > first.prompt_eval_count


def test_formats_bind_and_stops_end_an_answer(client: ollama.Client) -> None:
    for stream in (False, True):
        told = client.chat(
            "tiny", MESSAGES, format=SCHEMA, options={"temperature": 0, "num_predict": 120}, stream=stream
        )
        text = "".join(part.message.content for part in told) if stream else told.message.content
        assert 1 <= json.loads(text)["age"] <= 99
    told = client.generate("tiny", "Say", format="json", options={"temperature": 0, "num_predict": 60, "seed": 1})
    assert told.response.startswith("{")
    whole = client.generate("tiny", "Say", options=GREEDY).response
    stop = whole[4:6]
    ended = client.generate("tiny", "Say", options={**GREEDY, "stop": [stop]})
    assert ended.response == whole[: whole.index(stop)] and ended.done_reason == "stop"


def test_a_text_goes_on_raw_or_as_a_question(tiny: Running, client: ollama.Client) -> None:
    with tiny.client() as http:
        body = {"prompt": "Once", "max_tokens": 12, "temperature": 0}
        expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    raw = client.generate("tiny", "Once", raw=True, options=GREEDY)
    assert raw.response == expected and raw.context is None
    assert "".join(
        part.response for part in client.generate("tiny", "Once", raw=True, options=GREEDY, stream=True)
    ) == (expected)
    asked = client.generate("tiny", "Hello", system="Be brief.", options=GREEDY)
    assert asked.response == chatted(tiny)["choices"][0]["message"]["content"]
    assert len(asked.context) == asked.prompt_eval_count + asked.eval_count
    more = client.generate("tiny", "And?", context=asked.context, options=GREEDY)
    assert more.prompt_eval_count > len(asked.context)
    assert list(more.context[: len(asked.context)]) == list(asked.context)


def test_log_probabilities_are_those_of_chat(tiny: Running, client: ollama.Client) -> None:
    expected = chatted(tiny, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    with tiny.client() as http:
        body = {"model": "tiny", "messages": MESSAGES, "options": GREEDY, "logprobs": True, "top_logprobs": 2}
        whole = http.post("/api/chat", json={**body, "stream": False}).json()
        lines = [json.loads(line) for line in http.post("/api/chat", json=body).text.splitlines()]
    assert whole["logprobs"] == expected
    assert [entry for line in lines for entry in line.get("logprobs", ())] == expected


def test_calls_come_whole_and_their_results_go_back(client: ollama.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    required = functools.partial(ToolUse, choice="required")  # the random model would never call
    monkeypatch.setattr("lmstate.serve.ollama.answers.ToolUse", required)
    options = {"temperature": 0, "num_predict": 200}
    whole = client.chat("tiny", MESSAGES, tools=[TOOL], options=options)
    (call,) = whole.message.tool_calls
    assert call.function.name == "add" and 1 <= call.function.arguments["age"] <= 99
    parts = list(client.chat("tiny", MESSAGES, tools=[TOOL], options=options, stream=True))
    told = [one for part in parts for one in part.message.tool_calls or ()]
    assert [one.function for one in told] == [call.function]
    monkeypatch.undo()
    result = {"role": "tool", "content": "3", "tool_name": "add"}
    again = client.chat("tiny", [*MESSAGES, whole.message, result], tools=[TOOL], options=GREEDY)
    assert again.prompt_eval_count > whole.prompt_eval_count


def test_models_are_listed_shown_and_there(tiny: Running, client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model == "tiny:latest" and len(listed.digest) == 64 and listed.details.family == "qwen2"
    (running,) = client.ps().models
    assert running.model == "tiny:latest" and running.size == listed.size > 0
    shown = client.show(listed.model)
    assert shown.modelinfo["qwen2.context_length"] == tiny.server.service.context
    assert "tools" in shown.capabilities and shown.template
    assert client.pull("tiny").status == "success"
    assert client.generate("tiny").done_reason == client.chat("tiny").done_reason == "load"
    for ask in (client.show, client.pull, functools.partial(client.chat, messages=MESSAGES)):
        with pytest.raises(ollama.ResponseError, match="not served here") as error:
            ask("other")
        assert error.value.status_code == 404


def test_embeddings_are_those_of_the_other_protocol(tiny: Running, client: ollama.Client) -> None:
    with tiny.client() as http:
        told = http.post("/v1/embeddings", json={"input": ["one", "two"]}).json()["data"]
    expected = [pytest.approx(one["embedding"], abs=1e-6) for one in told]
    found = client.embed("tiny", ["one", "two"])
    assert [list(vector) for vector in found.embeddings] == expected and found.prompt_eval_count > 0
    assert list(client.embeddings("tiny", "one").embedding) == expected[0]
    assert len(client.embed("tiny", "one", dimensions=8).embeddings[0]) == 8
    long = "x" * 5000
    assert client.embed("tiny", long).prompt_eval_count == tiny.server.service.context - 1
    with pytest.raises(ollama.ResponseError, match="too long"):
        client.embed("tiny", long, truncate=False)


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        ("chat", {"messages": MESSAGES}, "model"),
        ("chat", {"model": "tiny", "messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "pictures"),
        ("chat", {"model": "tiny", "messages": MESSAGES, "options": {"top_p": 7}}, "options.top_p"),
        ("chat", {"model": "tiny", "messages": MESSAGES, "format": {"type": "nonsense"}}, "format"),
        ("generate", {"model": "tiny", "prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"model": "tiny", "prompt": "x", "context": [10**9]}, "context"),
        ("embed", {"model": "tiny", "input": []}, "input"),
        ("embed", {"model": "tiny", "input": "x", "dimensions": 10**6}, "dimensions"),
        ("show", {}, "model"),
    ],
)
def test_wrong_requests_are_told_in_ollamas_words(tiny: Running, path: str, body: dict[str, Any], wrong: str) -> None:
    with tiny.client() as client:
        answer = client.post(f"/api/{path}", json=body)
    assert answer.status_code == 400 and set(answer.json()) == {"error"} and wrong in answer.json()["error"]


def test_the_command_ps_lists_what_the_server_has_in_memory(tiny: Running) -> None:
    result = CliRunner().invoke(app, ["ps", "--url", tiny.url])
    assert result.exit_code == 0, result.stderr
    name, *_, context = result.stdout.splitlines()[2].split()[:4]
    assert (name, context) == ("tiny:latest", "2048")
