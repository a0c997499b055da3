"""Stop strings in every protocol: where they end an answer, and what is told of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.running import Running, events

USER = [{"role": "user", "content": "Say it."}]
SAID = "ab ab ab ab"  # a token a letter


def said(client: httpx.Client, path: str, **more: Any) -> tuple[str, str]:
    """(the text of an answer that would be SAID, why it ended), whole and streamed alike."""
    chat = path.endswith("chat/completions")
    body = {"messages": USER} if chat else {"prompt": "Say it."}
    body |= {"guided_regex": SAID, "max_tokens": 16, **more}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = choice["message"]["content"] if chat else choice["text"]
    streamed = events(client.post(path, json={**body, "stream": True}).text)[:-1]
    parts = [part["choices"][0] for _, part in streamed]
    assert "".join(part["delta"].get("content", "") if chat else part["text"] for part in parts) == text
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    return text, choice["finish_reason"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_stop_string_within_the_first_tokens_ends_an_answer(tiny: Running, path: str) -> None:
    with tiny.client() as client:
        for least, text in ((0, ""), (1, ""), (2, "ab "), (4, "ab "), (5, "ab ab "), (10, "ab ab ab "), (11, SAID)):
            assert said(client, path, stop="ab", min_tokens=least) == (text, "stop")
        assert said(client, path, stop=["ab", "b a"], min_tokens=2) == ("a", "stop")  # it may begin within them


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stop_string_ends_the_text_where_it_is_to_be_in_it(tiny: Running, path: str) -> None:
    with tiny.client() as client:
        for stop, text in (("b a", "ab a"), (["ab ab", "b"], "ab"), ("x", SAID), ("ab ab ab ab", SAID)):
            assert said(client, path, stop=stop, include_stop_str_in_output=True) == (text, "stop")
        assert said(client, path, stop="b", min_tokens=4, include_stop_str_in_output=True) == ("ab ab", "stop")
        assert said(client, path, stop="b", include_stop_str_in_output=False) == ("a", "stop")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_more_tokens_than_an_answer_may_have_are_no_least_number(tiny: Running, path: str) -> None:
    prompt: dict[str, Any] = {"messages": USER} if path.endswith("chat/completions") else {"prompt": "Say it."}
    with tiny.client() as client:
        refused = client.post(path, json={**prompt, "max_tokens": 3, "min_tokens": 4})
        taken = client.post(path, json={**prompt, "max_tokens": 4, "min_tokens": 4})
        filled = client.post("/v1/chat/completions", json={"messages": USER, "min_tokens": 10**6})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens", refused.text
    assert taken.status_code == 200 and taken.json()["usage"]["completion_tokens"] == 4, taken.text
    assert filled.status_code == 200, filled.text
    assert filled.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["b€c", "€", "ab€", "zz", "aaab€ccc"])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_log_probabilities_are_those_of_the_text(tiny: Running, path: str, stop: str, include: bool) -> None:
    said, chat = "aaab€cd", path.endswith("chat/completions")
    body: dict[str, Any] = {"messages": USER, "logprobs": True} if chat else {"prompt": "Say it.", "logprobs": 0}
    body |= {"guided_regex": said, "max_tokens": 16, "stop": stop, "return_token_ids": True}
    body["include_stop_str_in_output"] = include
    with tiny.client() as client:
        choice = client.post(path, json=body).json()["choices"][0]
        parts = [part["choices"][0] for _, part in events(client.post(path, json={**body, "stream": True}).text)[:-1]]
    before, found, _ = said.partition(stop)
    text = before + found if include else before

    def listed(logprobs: Any) -> list[Any]:
        if logprobs is None:
            return []
        return logprobs["content"] if chat else list(zip(*(logprobs[key] for key in sorted(logprobs))))

    told = listed(choice["logprobs"])
    assert (choice["message"]["content"] if chat else choice["text"]) == text
    assert len(told) == len(text.encode())
    assert [one for part in parts for one in listed(part.get("logprobs"))] == told
    sampled = (before + found).encode()
    for ids in (choice["token_ids"], [id for part in parts for id in part["token_ids"]]):
        assert len(ids) == len(sampled)  # as they were sampled, as vLLM gives them
    at = 0
    for part in parts:  # no chunk lists a token before its text
        at += len(listed(part.get("logprobs")))
        shown = "".join(
            (one["delta"].get("content", "") if chat else one["text"]) for one in parts[: parts.index(part) + 1]
        )
        assert at <= len(shown.encode())
