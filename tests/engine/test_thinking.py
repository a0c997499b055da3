"""Thinking sections that end early: the closing text comes, and the answer goes on as if that had been sampled."""

from __future__ import annotations

import pytest

import lmstate
from tests.engine.alone import alone
from tests.engine.chat import chatting, thinking

CLOSING = "!</think> "
ASKED = [{"role": "user", "content": "why?"}]
LONG = {"ignore_eos": True, "temperature": 0.0}


@pytest.mark.parametrize("case", ["llama", "qwen3_next-dense"])
@pytest.mark.parametrize("limit", [0, 7])
def test_a_section_has_at_most_its_tokens_and_what_follows_is_what_follows_that_text(case: str, limit: int) -> None:
    model = thinking(case)
    ids = model.tokenizer.chat(ASKED)
    closing = model.tokenizer.encode(CLOSING, add_special_tokens=False)
    with lmstate.Engine(model) as engine:
        for logprobs in (None, 0):
            got = engine.submit(ASKED, max_new_tokens=40, max_thinking_tokens=limit, logprobs=logprobs, **LONG).result(
                600
            )
            thought = alone(model, ids, limit, ends=frozenset())[0]
            after = [*ids, *thought, *closing]
            rest, logs, _ = alone(model, after, 40 - limit - len(closing), ends=frozenset())
            assert got.tokens == [[*thought, *closing, *rest]]
            assert got.usage.generated == 40
        assert got.logprobs is not None
        assert [entry.logprob for entry in got.logprobs[0][-len(logs) :]] == pytest.approx(logs, abs=1e-4)


def test_a_section_that_ends_by_itself_is_left_alone() -> None:
    model = thinking()
    said = model.tokenizer.encode("abc</think>", add_special_tokens=False)
    ids = [*model.tokenizer.chat(ASKED), *said]
    with lmstate.Engine(model) as engine:
        plain = engine.submit(ids, max_new_tokens=20, **LONG).result(600)
        assert engine.submit(ids, max_new_tokens=20, max_thinking_tokens=3, **LONG).result(600).tokens == plain.tokens


def test_a_section_that_the_answer_begins_is_counted_from_there() -> None:
    model = thinking()
    start = model.tokenizer.encode("<think>", add_special_tokens=False)
    closing = model.tokenizer.encode(CLOSING, add_special_tokens=False)
    ids = model.tokenizer.encode("[user]why?<end>[assistant]")
    with lmstate.Engine(model) as engine:
        got = engine.submit(
            ids, max_new_tokens=40, max_thinking_tokens=2, grammar=Begins(start, model.config.vocab_size), **LONG
        ).result(600)
    assert got.tokens[0][: len(start)] == start
    assert got.tokens[0][len(start) + 2 :][: len(closing)] == closing


class Begins:
    """A grammar: some tokens, then anything."""

    def __init__(self, tokens: list[int], vocab: int) -> None:
        self.tokens, self.vocab, self.at = tokens, vocab, 0
        self.complete, self.ended = True, False

    def allowed(self):  # type: ignore[no-untyped-def]
        import torch

        if self.at >= len(self.tokens):
            return None
        return torch.arange(self.vocab) == self.tokens[self.at]

    def accept(self, token: int) -> None:
        self.at += 1

    def rollback(self, count: int) -> None:
        self.at -= count

    def forced(self) -> list[int]:
        return []

    def copy(self) -> Begins:
        return Begins(self.tokens, self.vocab)


def test_a_request_can_be_told_to_stop_thinking_while_it_runs() -> None:
    model = thinking()
    with lmstate.Engine(model) as engine:
        request = engine.submit(ASKED, max_new_tokens=10**5, **LONG)
        pieces = iter(request)
        for _ in range(5):
            next(pieces)
        request.end_thinking()
        text = ""
        while CLOSING not in text:
            text += next(pieces)
        request.cancel()
        tokens = request.result(600).tokens[0]
    closing = model.tokenizer.encode(CLOSING, add_special_tokens=False)
    at = next(i for i in range(len(tokens)) if tokens[i : i + len(closing)] == closing)
    assert at >= 5
    rest = tokens[at + len(closing) :]
    ids = [*model.tokenizer.chat(ASKED), *tokens[: at + len(closing)]]
    assert rest[:20] == alone(model, ids, min(len(rest), 20), ends=frozenset())[0]


def test_a_model_that_does_not_think_aloud_says_so() -> None:
    with lmstate.Engine(chatting()) as engine:
        with pytest.raises(lmstate.UnsupportedError, match="writes none"):
            engine.submit(ASKED, max_thinking_tokens=5)
        request = engine.submit(ASKED, max_new_tokens=3)
        with pytest.raises(lmstate.UnsupportedError, match="writes none"):
            request.end_thinking()
        assert request.result(600).usage.generated <= 3
