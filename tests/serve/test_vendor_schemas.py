"""Every answer is valid by the schemas that the vendors of the protocols publish: whole, and each event of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmstate.engine import Engine
from lmstate.serve import Settings
from tests.serve.byte_tokenizer import TEMPLATE
from tests.serve.running import Running, events, load_tiny, running, saying
from tests.serve.vendor_schemas import complain, complain_open_responses

USER = [{"role": "user", "content": "Go."}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
SAID = {
    "text": "Well, well.",
    "stopped": "Well#",
    "cut": "Well." * 20,
    "thought": "<think>Hm.</think>\n\nSo.",
    "call": f"Now.{CALL}",
    "cut call": CALL[:-30] + "1" * 90,
}
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
CHAT: dict[str, Any] = {
    "messages": USER,
    "max_tokens": 90,
    "stop": "#",
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": FUNCTION}],
}
RESPONSES: dict[str, Any] = {
    "input": USER,
    "max_output_tokens": 90,
    "stop": "#",
    "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "messages": USER,
    "max_tokens": 90,
    "stop_sequences": ["#"],
    "tools": [{"name": "f", "input_schema": PARAMETERS}],
}
COMPLETION = {"prompt": ["Go.", "On."], "max_tokens": 90, "stop": "#", "stream_options": {"include_usage": True}}
FORMAT = {"type": "json_schema", "name": "n", "schema": PARAMETERS}
# Name: (path, body, the vendor, its schema of a whole answer and of an event).
GENERATING: dict[str, tuple[str, dict[str, Any], str, str, str]] = {}
for name, path, bodies, vendor, whole, streamed in (
    (
        "chat",
        "/v1/chat/completions",
        ({}, {"logprobs": True, "top_logprobs": 2, "n": 2}, SAMPLED),
        "openai",
        "CreateChatCompletionResponse",
        "CreateChatCompletionStreamResponse",
    ),
    (
        "completions",
        "/v1/completions",
        ({}, {"logprobs": 1, "n": 2}, SAMPLED),
        "openai",
        "CreateCompletionResponse",
        "CreateCompletionResponse",
    ),
    (
        "responses",
        "/v1/responses",
        (
            {},
            {"top_logprobs": 2, "store": False, "reasoning": {"effort": "low"}},
            {**SAMPLED, "truncation": "auto", "instructions": "Be brief.", "metadata": {"a": "b"}},
            {"text": {"format": FORMAT}, "tool_choice": "auto", "presence_penalty": 0.5, "safety_identifier": "s"},
            {"tool_choice": {"type": "function", "name": "f"}, "prompt_cache_key": "k", "service_tier": "auto"},
            {"tools": None},
        ),
        "openai",
        "Response",
        "ResponseStreamEvent",
    ),
    ("messages", "/v1/messages", ({}, SAMPLED), "anthropic", "Message", "MessageStreamEvent"),
    ("beta messages", "/v1/messages?beta=true", ({},), "anthropic", "BetaMessage", "BetaMessageStreamEvent"),
):
    base = {"chat": CHAT, "completions": COMPLETION, "responses": RESPONSES}.get(name, MESSAGES)
    for number, more in enumerate(bodies):
        GENERATING[f"{name} {number}"] = path, {**base, **more}, vendor, whole, streamed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that thinks aloud."""
    model = load_tiny(tmp_path_factory.mktemp("model"), template="{# <think> </think> #}" + TEMPLATE)
    with Engine(model, rows=4) as engine, running(engine, Settings("tiny", port=0, aliases=("other",))) as server:
        yield server


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("asked", GENERATING)
def test_generated_answers(server: Running, asked: str, said: str) -> None:
    path, body, vendor, whole, streamed = GENERATING[asked]
    with server.client() as client, saying(server, SAID[said]):
        answer = client.post(path, json={name: value for name, value in body.items() if name != "stream_options"})
        stream = client.post(path, json={**body, "stream": True})
    assert (answer.status_code, stream.status_code) == (200, 200), (answer.text, stream.text)
    told = [data for name, data in events(stream.text) if data != "[DONE]" and name != "ping"]
    assert told
    answers = [(whole, answer.json()), *((streamed, data) for data in told)]
    if path.endswith("/completions"):
        answers = [(name, _filled(data) if name == streamed else data) for name, data in answers]
    wrong = {f"{name}: {found}" for name, data in answers if (found := complain(vendor, name, _without_nulls(data)))}
    if vendor == "openai" and "responses" in path:
        wrong |= {f"Open Responses: {found}" for _, data in answers if (found := complain_open_responses(data))}
    assert not wrong, "\n".join(sorted(wrong))


def _filled(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk without the nulls that its schema lacks, and that OpenAI sends: the usage before the last chunk, the
    reason to end that only the last one has, the log probabilities of a refusal."""
    choices = []
    for choice in chunk["choices"]:
        logprobs = choice.get("logprobs")
        if logprobs is not None and chunk["object"] != "text_completion":
            logprobs = {name: value or [] for name, value in logprobs.items()}
        told = {"logprobs": logprobs} if "logprobs" in choice else {}
        choices.append({**choice, **told, "finish_reason": choice["finish_reason"] or "stop"})
    return {name: value for name, value in {**chunk, "choices": choices}.items() if (name, value) != ("usage", None)}


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """A response, or an event with one, without nulls that OpenAI's schema has no place for, and Open Responses
    requires."""
    if "response" in data:
        return {**data, "response": _without_nulls(data["response"])}
    if isinstance(data.get("text"), dict):
        format = {name: value for name, value in data["text"]["format"].items() if value is not None}
        data = {**data, "text": {**data["text"], "format": format}}
    names = ("prompt_cache_key", "safety_identifier", "usage")
    return {name: value for name, value in data.items() if value is not None or name not in names}


def test_other_answers(server: Running) -> None:
    with server.client() as client:

        def check(vendor: str, name: str, path: str, body: Any = None, open_responses: bool = False) -> Any:
            answer = client.get(path) if body is None else client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            told = answer.json()
            found = complain(vendor, name, _without_nulls(told))
            assert found is None, found
            found = complain_open_responses(told) if open_responses else None
            assert found is None, found
            return told

        check("openai", "ListModelsResponse", "/v1/models")
        check("openai", "Model", "/v1/models/tiny")
        check("anthropic", "ListResponse_ModelInfo_", "/v1/models")
        check("anthropic", "ModelInfo", "/v1/models/other")
        check("anthropic", "BetaModelInfo", "/v1/models/other?beta=true")
        check("openai", "CreateEmbeddingResponse", "/v1/embeddings", {"input": ["a", "b"]})
        counted = {key: MESSAGES[key] for key in ("model", "messages", "tools")}
        check("anthropic", "CountMessageTokensResponse", "/v1/messages/count_tokens", counted)
        check("openai", "TokenCountsResource", "/v1/responses/input_tokens", RESPONSES)
        check("openai", "CompactResource", "/v1/responses/compact", {"input": USER})
        conversation = check("openai", "ConversationResource", "/v1/conversations", {"items": USER})["id"]
        asked = {**RESPONSES, "conversation": conversation}
        made = check("openai", "Response", "/v1/responses", asked, True)["id"]
        check("openai", "Response", f"/v1/responses/{made}", None, True)
        check("openai", "ResponseItemList", f"/v1/responses/{made}/input_items")
        check("openai", "ConversationResource", f"/v1/conversations/{conversation}")
        items = check("openai", "ConversationItemList", f"/v1/conversations/{conversation}/items")
        check("openai", "ConversationItem", f"/v1/conversations/{conversation}/items/{items['first_id']}")
        made = check("openai", "Response", "/v1/responses", {**RESPONSES, "background": True}, True)["id"]
        check("openai", "Response", f"/v1/responses/{made}/cancel", {}, True)
