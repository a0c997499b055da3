"""The clients' own libraries against SmolLM2: strict validation of every answer, streams, tools, schemas, state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

from tests.serve.running import Running, events

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}}
# Tokens that a grammar forces at the end of an answer are given out but never computed: so many may not be reused.
# A call that was not found as it was sampled would differ long before.
FORCED = 12
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


@pytest.fixture(scope="module")
def client(real: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{real.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def claude(real: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=real.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def test_models(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"
    assert [(model.id, model.type) for model in claude.models.list()] == [("smollm2", "model")]
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.models.retrieve("other")


def test_every_answer_and_error_has_the_id_of_its_request(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "smollm2", "messages": CAPITAL, "max_tokens": 1}
    own = {"x-request-id": "trace-7/a"}
    made = client.chat.completions.create(**asked), claude.messages.create(**asked)
    again = (
        client.chat.completions.create(**asked, extra_headers=own),
        claude.messages.create(**asked, extra_headers=own),
    )
    for first, second in zip(made, again):
        assert (first._request_id or "").startswith("req_")
        assert second._request_id == "trace-7/a"
    assert made[0]._request_id != made[1]._request_id
    with pytest.raises(openai.NotFoundError) as not_there:
        client.models.retrieve("other", extra_headers=own)
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(**{**asked, "max_tokens": -1}, extra_headers=own)
    assert not_there.value.request_id == refused.value.request_id == "trace-7/a"
    with client.chat.completions.with_streaming_response.create(**asked, stream=True) as stream:
        assert (stream.request_id or "").startswith("req_")


def test_chat_streamed_whole_and_by_the_asynchronous_client_is_one_answer(client: openai.OpenAI, real: Running) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=CAPITAL, max_completion_tokens=12, logprobs=True)
    text = whole.choices[0].message.content
    assert text
    assert "Paris" in text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12 or whole.choices[0].finish_reason == "stop"
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert b"".join(bytes(token.bytes or []) for token in told.content).decode().strip() == text.strip()
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=CAPITAL,
            max_completion_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None
    assert (details.cached_tokens or 0) >= whole.usage.prompt_tokens - 1

    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none") as both:
            asked = [
                both.chat.completions.create(model="smollm2", messages=CAPITAL, max_tokens=12, n=2) for _ in range(2)
            ]
            return [choice.message.content for answer in await asyncio.gather(*asked) for choice in answer.choices]

    assert asyncio.run(ask()) == [text] * 4


def test_token_ids_are_told_whole_and_streamed(client: openai.OpenAI, real: Running) -> None:
    tokenizer = real.engine.model.tokenizer
    more: Any = {"return_token_ids": True}
    asked: Any = {"model": "smollm2", "messages": CAPITAL, "max_tokens": 6, "extra_body": more}
    whole = client.chat.completions.create(**asked).model_dump()
    prompt, ids = whole["prompt_token_ids"], whole["choices"][0]["token_ids"]
    assert prompt == tokenizer.chat(CAPITAL)
    assert tokenizer.decode(ids) == whole["choices"][0]["message"]["content"]
    chunks = [chunk.model_dump() for chunk in client.chat.completions.create(**asked, stream=True)]
    assert chunks[0]["prompt_token_ids"] == prompt
    assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == ids
    text: Any = {"model": "smollm2", "prompt": prompt, "max_tokens": 6, "extra_body": more}
    assert client.completions.create(**text).model_dump()["choices"][0]["token_ids"] == ids
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none") as lax:  # its types take no null finish_reason
        pieces = [chunk.model_dump()["choices"][0] for chunk in lax.completions.create(**text, stream=True)]
    assert [id for piece in pieces for id in piece["token_ids"]] == ids


def test_stop_strings_and_seeds(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=CAPITAL, max_tokens=20, stop=["Paris"])
    assert "Paris" not in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    texts = {
        client.chat.completions.create(
            model="smollm2", messages=CAPITAL, max_tokens=8, temperature=1.5, seed=7
        ).choices[0].message.content
        for _ in range(2)
    }  # fmt: skip
    assert len(texts) == 1


def test_a_stop_string_is_in_no_later_prompt(client: openai.OpenAI, real: Running) -> None:
    asked = {"messages": CAPITAL, "max_tokens": 40, "stop": ["Paris"], "return_token_ids": True}
    with real.client() as http:

        def text(tokens: list[int]) -> str:
            return str(http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])

        (choice,) = http.post("/v1/chat/completions", json=asked).json()["choices"]
        assert "Paris" in text(choice["token_ids"])  # it was sampled, and is not said
        answer = {"role": "assistant", "content": choice["message"]["content"]}
        asked["messages"] = [*CAPITAL, answer, {"role": "user", "content": "Go on."}]
        later = http.post("/v1/chat/completions", json=asked).json()
        assert "Paris" not in text(later["prompt_token_ids"])
    first = client.responses.create(model="smollm2", input=CAPITAL[0]["content"], extra_body={"stop": ["Paris"]})
    second = client.responses.create(model="smollm2", input="Go on.", previous_response_id=first.id)
    assert second.usage is not None
    assert second.usage.input_tokens == later["usage"]["prompt_tokens"]


def test_a_schema_is_met_and_parsed(client: openai.OpenAI) -> None:
    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=120)

    messages: list[Any] = [{"role": "user", "content": "Describe a person as JSON."}]
    parsed = client.chat.completions.parse(model="smollm2", messages=messages, response_format=Person, max_tokens=80)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    answer = client.chat.completions.create(
        model="smollm2", messages=messages, response_format={"type": "json_object"}, max_tokens=200, stop=["}"]
    )
    assert (answer.choices[0].message.content or "").startswith("{")
    choice = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, max_tokens=8, extra_body={"guided_choice": ["Berlin", "Rome"]}
    )
    assert choice.choices[0].message.content in ("Berlin", "Rome")
    digits = client.completions.create(
        model="smollm2", prompt="7 * 6 =", max_tokens=8, extra_body={"guided_regex": " [0-9]{2}"}
    )
    assert digits.choices[0].text[1:].isdigit()


def test_tokens_begin_in_the_text_where_they_are_said_to(real: Running) -> None:
    body = {"prompt": "日本の首都 😀😀 is", "max_tokens": 6, "logprobs": 0, "echo": True}
    forced = {"prompt": "Two cities:", "max_tokens": 20, "logprobs": 0, "guided_choice": ["日本 and 京都"]}
    with real.client() as client:
        choices = [client.post("/v1/completions", json=one).json()["choices"][0] for one in (body, forced)]
        events = client.post("/v1/completions", json={**forced, "stream": True}).text.split("\n\n")
    pieces = [json.loads(line[6:])["choices"][0] for line in events if line.startswith("data: {")]
    told = [at for piece in pieces if piece["logprobs"] for at in piece["logprobs"]["text_offset"]]
    assert told == choices[1]["logprobs"]["text_offset"]
    for choice in choices:
        text, names, offsets = choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert any(name.startswith("bytes:") for name in names)
        assert offsets[0] == 0 and offsets == sorted(offsets)
        assert all(text[at:].startswith(name) for at, name in zip(offsets, names) if not name.startswith("bytes:"))
        assert offsets[-1] < len(text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_required_call_is_well_formed_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": "smollm2", "messages": ASK, "tools": [TOOL], "tool_choice": choice, "max_tokens": 120}
    whole = client.chat.completions.create(**asked, parallel_tool_calls=False)
    assert whole.choices[0].finish_reason == "tool_calls"
    call = (whole.choices[0].message.tool_calls or [])[0]
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        for _ in stream:
            pass
        streamed = (stream.get_final_completion().choices[0].message.tool_calls or [])[0]
    assert json.loads(streamed.function.arguments) == arguments


def test_a_call_sent_back_in_other_words_reuses_what_was_sampled(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "tools": [TOOL], "max_tokens": 120}
    first = client.chat.completions.create(messages=ASK, tool_choice="required", parallel_tool_calls=False, **asked)
    call = (first.choices[0].message.tool_calls or [])[0]
    assert call.type == "function"
    # Another order of nothing, another spacing: not the text that the model wrote.
    rewritten = json.dumps(json.loads(call.function.arguments), indent=1)
    assert rewritten != call.function.arguments
    back: Any = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": rewritten}}
        ],
    }
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    second = client.chat.completions.create(messages=[*ASK, back, result], **asked)
    assert first.usage is not None
    assert second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None
    assert (details.cached_tokens or 0) >= first.usage.total_tokens - FORCED


def test_completions_of_texts_and_of_tokens_score_their_prompts(real: Running) -> None:
    # The protocol gives null for the first token of a prompt, which the library's types do not have.
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none") as client:
        tokenizer = real.engine.model.tokenizer
        ids = tokenizer.encode("The capital of France is Paris")
        asked: Any = {"model": "smollm2", "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
        scored = client.completions.create(prompt=[ids, ids[:3]], **asked)
        told = scored.choices[0].logprobs
        assert told is not None
        assert told.token_logprobs is not None
        assert len(told.token_logprobs) == len(ids) + 1
        assert told.token_logprobs[0] is None
        logits = real.engine.call(lambda model: model([ids]).log_softmax(-1)).result()
        expected = [float(logits[0, at, token]) for at, token in enumerate(ids[1:])]
        np.testing.assert_allclose(told.token_logprobs[1:-1], expected, atol=0.05)
        assert "".join(told.tokens or []).startswith("The capital of France is Paris")
        assert scored.choices[1].text.startswith(tokenizer.decode(ids[:3]))
        text = client.completions.create(prompt="The capital of France is Paris", **asked)
        assert text.choices[0].text == scored.choices[0].text
        with pytest.raises(openai.BadRequestError, match="fill-in"):
            client.completions.create(model="smollm2", prompt="a", suffix="b")
        streamed = client.completions.create(model="smollm2", prompt=["One", "Two"], max_tokens=4, stream=True)
        texts = ["", ""]
        for chunk in streamed:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        whole = client.completions.create(model="smollm2", prompt=["One", "Two"], max_tokens=4)
        assert texts == [choice.text for choice in whole.choices]


def test_log_probabilities_of_completions_are_told_alike_whole_and_streamed(tiny: Running) -> None:
    asked: Any = {"model": "tiny", "prompt": ["ab", "c"], "n": 2, "temperature": 1, "seed": 1, "logprobs": 2}
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(**asked).choices
        parts = [choice for chunk in client.completions.create(**asked, stream=True) for choice in chunk.choices]
    for choice in whole:
        told = [part.logprobs for part in parts if part.index == choice.index and part.logprobs is not None]
        for name, values in dict(choice.logprobs or {}).items():
            assert [value for some in told for value in getattr(some, name)] == values


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_usage_of_a_stream_is_null_until_the_end(tiny: Running, path: str) -> None:
    body = {"messages": CAPITAL, "prompt": ["ab", "c"], "max_tokens": 3, "ignore_eos": True, "stream": True}
    with tiny.client() as client:
        asked = client.post(path, json={**body, "stream_options": {"include_usage": True}}).text
        plain = client.post(path, json=body).text
    *parts, last = [part for _, part in events(asked) if part != "[DONE]"]
    assert parts and all(part["usage"] is None and part["choices"] for part in parts)
    assert last["usage"]["completion_tokens"] and last["choices"] == []
    assert not any("usage" in part for _, part in events(plain) if part != "[DONE]")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_chunk_tells_the_tokens_so_far_where_that_is_asked_for(tiny: Running, path: str) -> None:
    body = {"messages": CAPITAL, "prompt": ["ab", "c"], "max_tokens": 5, "ignore_eos": True, "n": 2, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    with tiny.client() as client:
        told = client.post(path, json={**body, "return_token_ids": True, "stream_options": options}).text
    *parts, last = [part for _, part in events(told) if part != "[DONE]"]
    most = last["usage"]["completion_tokens"]
    seen = [part["usage"]["completion_tokens"] for part in parts]
    assert seen == sorted(seen) and seen[-1] == most
    assert len(set(seen)) > 2
    listed = sum(len(choice.get("token_ids") or []) for part in parts for choice in part["choices"])
    assert listed == most
    for part in parts:
        usage = part["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]


OTHER: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CHAT_CHOICES: list[Any] = [
    "auto",
    "none",
    "required",
    {"type": "function", "function": {"name": "now"}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "now"}]}},
]


def test_no_tool_choice_changes_the_prompt(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    used: set[int] = set()
    for choice in CHAT_CHOICES:
        made = client.chat.completions.create(
            model="smollm2", messages=ASK, tools=[TOOL, OTHER], tool_choice=choice, max_tokens=24
        )
        assert made.usage is not None and made.usage.prompt_tokens_details is not None
        if used:
            assert (made.usage.prompt_tokens_details.cached_tokens or 0) >= made.usage.prompt_tokens - 1
        used.add(made.usage.prompt_tokens)
        message = made.choices[0].message
        if choice == "none":
            assert message.content and not message.tool_calls
            assert "<tool_call>" not in message.content
    functions: Any = [{"type": "function", **tool["function"]} for tool in (TOOL, OTHER)]
    answer = client.responses.create(model="smollm2", input=ASK, tools=functions, tool_choice="none")
    assert answer.usage is not None
    used.add(answer.usage.input_tokens)
    assert len(used) == 1
    tools: Any = [{"name": "get_weather", "description": "Weather.", "input_schema": WEATHER}]
    asked: Any = {"model": "smollm2", "messages": ASK, "tools": tools, "max_tokens": 24}
    first = claude.messages.create(**asked, tool_choice={"type": "auto"}).usage
    other = claude.messages.create(**asked, tool_choice={"type": "none"})
    total = first.input_tokens + (first.cache_read_input_tokens or 0)
    assert other.usage.cache_read_input_tokens == total - other.usage.input_tokens >= total - 1
    assert [block.type for block in other.content] == ["text"]


def test_responses_go_on_from_the_very_tokens(client: openai.OpenAI) -> None:
    first = client.responses.create(model="smollm2", input="My name is Ann. Say hello.", max_output_tokens=20)
    assert first.usage is not None
    events = list(
        client.responses.create(
            model="smollm2",
            input="What is my name?",
            previous_response_id=first.id,
            max_output_tokens=20,
            stream=True,
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.usage is not None
    assert last.response.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == last.response.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert client.responses.input_items.list(first.id).data[0].type == "message"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="smollm2", input="x", previous_response_id=first.id)
    unstored = client.responses.create(model="smollm2", input="Hi", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_responses_call_functions_and_take_their_results(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": WEATHER}
    others: Any = [tool, {"type": "web_search"}]
    asked: Any = {"model": "smollm2", "tools": others, "max_output_tokens": 100, "parallel_tool_calls": False}
    with client.responses.stream(input="Weather in Paris in celsius?", tool_choice="required", **asked) as stream:
        for _ in stream:
            pass
        made = stream.get_final_response()
    call = next(item for item in made.output if item.type == "function_call")
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}]
    after = client.responses.create(input=output, previous_response_id=made.id, **asked)
    assert after.usage is not None
    assert made.usage is not None
    assert after.usage.input_tokens_details.cached_tokens >= made.usage.total_tokens - FORCED


def test_custom_tools_get_text_whole_and_streamed(client: openai.OpenAI) -> None:
    tool: Any = {"type": "custom", "name": "run_shell", "description": "Runs a command, such as ls."}
    asked: Any = {"model": "smollm2", "tools": [tool], "max_output_tokens": 100, "parallel_tool_calls": False}
    asked["tool_choice"] = {"type": "custom", "name": "run_shell"}
    events = list(client.responses.create(input="List the files, with ls.", stream=True, **asked))
    last = events[-1]
    assert last.type == "response.completed"
    call = last.response.output[-1]
    assert call.type == "custom_tool_call"
    assert (call.name, call.input != "", "input" in call.input) == ("run_shell", True, False)
    told = "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta")
    assert told == call.input
    whole = client.responses.create(input="List the files, with ls.", **asked).output[-1]
    assert whole.type == "custom_tool_call"
    assert whole.input == call.input
    output: Any = [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "a.py"}]
    after = client.responses.create(input=output, previous_response_id=last.response.id, **asked)
    assert after.usage is not None
    assert last.response.usage is not None
    assert after.usage.input_tokens_details.cached_tokens >= last.response.usage.total_tokens - FORCED


def test_custom_tools_of_a_chat_get_text_whole_and_streamed(client: openai.OpenAI, real: Running) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "ls.*"}}
    custom = {"name": "run_shell", "description": "Runs a command, such as ls.", "format": grammar}
    ask: list[Any] = [{"role": "user", "content": "List the files, with ls."}]
    asked: Any = {"model": "smollm2", "tools": [{"type": "custom", "custom": custom}, TOOL], "max_tokens": 100}
    choice: Any = {"type": "custom", "custom": {"name": "run_shell"}}
    whole = client.chat.completions.create(messages=ask, tool_choice=choice, **asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    call = (whole.choices[0].message.tool_calls or [])[0]
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input != "", "input" in call.custom.input) == ("run_shell", True, False)
    # The library's type of a chunk has no custom tools, which the protocol has.
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none") as lenient:
        chunks = list(lenient.chat.completions.create(messages=ask, tool_choice=choice, stream=True, **asked))
    told = [call.to_dict() for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert told[0] == {"index": 0, "id": told[0]["id"], "type": "custom", "custom": {"name": "run_shell", "input": ""}}
    assert told[1:] == [{"index": 0, "custom": {"input": call.custom.input}}]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    back: Any = {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "a.py"}
    after = client.chat.completions.create(messages=[*ask, back, result], **asked)
    assert after.usage is not None and after.usage.prompt_tokens_details is not None
    assert whole.usage is not None
    assert (after.usage.prompt_tokens_details.cached_tokens or 0) >= whole.usage.total_tokens - FORCED


def test_a_compacted_conversation_goes_on(real: Running) -> None:
    # The protocol gives the user's messages, for which the library's type of an output has no place.
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none") as client:
        first = client.responses.create(model="smollm2", input="My name is Ann.", max_output_tokens=8)
        made = client.responses.compact(model="smollm2", previous_response_id=first.id, input="I live in Rome.")
        assert [item.type for item in made.output] == ["message", "message", "compaction"]
        assert made.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1  # type: ignore[union-attr]
        items: Any = [item.to_dict(warnings=False) for item in made.output]
        after = client.responses.create(
            model="smollm2", input=[*items, {"role": "user", "content": "Where?"}], max_output_tokens=4
        )
        assert after.usage is not None
        assert after.usage.input_tokens > made.usage.output_tokens
        again = client.responses.compact(model="smollm2", input=[*items, {"role": "user", "content": "Where?"}])
        assert [item.type for item in again.output] == ["message", "message", "message", "compaction"]


def test_messages_streamed_and_whole_are_one_answer(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "smollm2", "max_tokens": 12, "messages": CAPITAL, "system": "Be brief."}
    whole = claude.messages.create(**asked)
    assert whole.content[0].type == "text"
    assert "Paris" in whole.content[0].text
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    count = claude.messages.count_tokens(model="smollm2", messages=CAPITAL, system="Be brief.")
    usage = whole.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    stopped = claude.messages.create(**{**asked, "stop_sequences": ["Paris"]})
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == "Paris"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(**{**asked, "max_tokens": -1})
    warmed = claude.messages.create(**{**asked, "max_tokens": 0})  # as clients ask for a prompt to be read ahead
    assert (warmed.content, warmed.stop_reason) == ([], "max_tokens")


def test_messages_use_tools(claude: anthropic.Anthropic) -> None:
    tools: Any = [{"name": "get_weather", "description": "Weather.", "input_schema": WEATHER}]
    asked: Any = {"model": "smollm2", "max_tokens": 100, "tools": tools}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with claude.messages.stream(messages=ASK, tool_choice=choice, **asked) as stream:
        made = stream.get_final_message()
    assert made.stop_reason == "tool_use"
    call = made.content[-1]
    assert call.type == "tool_use"
    assert set(call.input) == {"city", "unit"}
    back: Any = {"role": "assistant", "content": [block.model_dump() for block in made.content]}
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}]}
    after = claude.messages.create(messages=[*ASK, back, {"role": "user", "content": [result]}], **asked)
    usage = made.usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens
    assert (after.usage.cache_read_input_tokens or 0) >= total - FORCED


def test_a_line_that_changes_with_every_request_costs_no_prefix(claude: anthropic.Anthropic) -> None:
    counts = [
        claude.messages.count_tokens(
            model="smollm2", messages=CAPITAL, system=f"x-anthropic-billing-header: cch={number};\nBe brief."
        ).input_tokens
        for number in (1, 123456)
    ]
    plain = claude.messages.count_tokens(model="smollm2", messages=CAPITAL, system="Be brief.").input_tokens
    assert counts == [plain, plain]


def test_embeddings_of_like_texts_are_alike(real: Running) -> None:
    texts = ["A cat sits on the mat.", "A kitten sat on a rug.", "Quarterly revenue grew by nine percent."]
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none") as client:  # decodes base64 by itself
        vectors = np.array([item.embedding for item in client.embeddings.create(model="smollm2", input=texts).data])
        numbers = client.embeddings.create(model="smollm2", input=texts[0], encoding_format="float", dimensions=16)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    likeness = vectors @ vectors.T
    assert likeness[0, 1] > likeness[0, 2]
    short = np.array(numbers.data[0].embedding)
    np.testing.assert_allclose(short, vectors[0][:16] / np.linalg.norm(vectors[0][:16]), atol=1e-5)


def test_the_tokenizer_over_http_is_the_models(real: Running) -> None:
    tokenizer = real.engine.model.tokenizer
    with real.client() as client:
        ids = client.post("/tokenize", json={"prompt": "Zürich, naïve 🙂"}).json()["tokens"]
        assert ids == tokenizer.encode("Zürich, naïve 🙂")
        assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "Zürich, naïve 🙂"
        chat = client.post("/tokenize", json={"messages": CAPITAL}).json()["tokens"]
        assert chat == tokenizer.chat(CAPITAL)
        text = client.post("/apply-template", json={"messages": CAPITAL}).json()["prompt"]
        assert text == tokenizer.chat_text(CAPITAL)
        unanswered = {"messages": CAPITAL, "add_generation_prompt": False}
        assert client.post("/tokenize", json=unanswered).json()["tokens"] == tokenizer.chat(CAPITAL, False)
        text = client.post("/apply-template", json=unanswered).json()["prompt"]
        assert text == tokenizer.chat_text(CAPITAL, False)
        continued = [*CAPITAL, {"role": "assistant", "content": "It is"}]
        unanswered |= {"messages": continued, "continue_final_message": True}  # as vLLM's clients pair the two
        text = client.post("/apply-template", json=unanswered).json()["prompt"]
        assert text == tokenizer.chat_text(CAPITAL) + "It is"
        info = client.get("/tokenizer_info").json()
        assert info["eos_token"] in ("<|endoftext|>", "<|im_end|>")
