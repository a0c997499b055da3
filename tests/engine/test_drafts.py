"""Drafts in the engine: answers, log probabilities and states are those without, whatever is drafted beside what."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import lmstate
from lmstate.engine import Completion
from lmstate.generation.sampling import Sampler
from lmstate.ops import dispatch
from lmstate.speculation import ModelDrafter, Speculator, TextDrafter
from lmstate.state import State
from tests.engine.alone import alone
from tests.engine.test_batching import KINDS, OneOf, OneOrMore, paused, prompt
from tests.speculation.drafters import always
from tests.zoo import VOCAB, ours

EXACT = dispatch.choice().library is not None  # torch's products round by the number of rows


class Knowing:
    """Knows whole texts, and says each token of the one that a row is in rightly with a given probability."""

    def __init__(self, wholes: Sequence[Sequence[int]], right: float, seed: int = 0) -> None:
        self.wholes = [list(whole) for whole in wholes]
        self.right, self.random = right, random.Random(seed)
        self.rows: dict[int, list[int]] = {}

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        for row, tokens in zip(rows, accepted):
            assert tokens, "a row that goes on has new tokens"
            self.rows.setdefault(row, []).extend(tokens)

    def forget(self, row: int) -> None:
        del self.rows[row]

    def propose(self, rows: Sequence[int], depth: int) -> list[list[int]]:
        drafts = []
        for text in (self.rows[row] for row in rows):
            whole = next((whole for whole in self.wholes if whole[: len(text)] == text), text)
            ahead = whole[len(text) :][: self.random.randint(0, depth)]
            drafts.append([t if self.random.random() < self.right else self.random.randrange(VOCAB) for t in ahead])
        return drafts


def asked(model: lmstate.Model, requests: Sequence[dict[str, Any]], draft: Any, rows: int = 4) -> list[Completion]:
    with lmstate.Engine(model, rows=rows, draft=draft) as engine:
        go = paused(engine)
        submitted = [engine.submit(**request) for request in requests]
        go.set()
        got = [request.result(600) for request in submitted]
        engine.call(lambda _: None).result(600)  # the step that ended the last of them is over
        stats = engine.stats()
        assert (stats["row_bytes"], stats["failed"]) == (0, 0)
        assert stats["drafted_tokens"] == sum(one.usage.drafted for one in got)
        assert stats["accepted_tokens"] == sum(one.usage.accepted for one in got)
        report = engine.draft_report()
        assert report.accepted in (0, stats["accepted_tokens"]), "but for a drafter that failed"
        assert list(report.held) == sorted(report.held, reverse=True) and report.drafts <= report.drafted
    return got


def same(one: Completion, other: Completion) -> None:
    assert (one.tokens, one.finished, one.stopped_by) == (other.tokens, other.finished, other.stopped_by)
    assert (one.logprobs is None) == (other.logprobs is None)
    if EXACT:
        assert one.logprobs == other.logprobs
    assert (one.usage.prompt, one.usage.generated) == (other.usage.prompt, other.usage.generated)


def mixed(eos: int) -> list[dict[str, Any]]:
    """Requests of all sorts, more than there are rows."""
    return [
        {"prompt": prompt(30, 1), "max_new_tokens": 25, "logprobs": 2, "ignore_eos": True},
        {"prompt": prompt(3, 2), "max_new_tokens": 40},
        {"prompt": prompt(17, 3), "max_new_tokens": 18, "temperature": 1.1, "top_k": 20, "seed": 7, "n": 3},
        {"prompt": prompt(60, 4), "max_new_tokens": 12, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"prompt": prompt(9, 5), "max_new_tokens": 30, "stop_token_ids": [eos], "min_tokens": 6},
        {"prompt": prompt(5, 6), "max_new_tokens": 1},
        {"prompt": [3, 4], "max_new_tokens": 20, "grammar": OneOrMore(), "temperature": 0.8, "seed": 3},
        {"prompt": prompt(12, 8), "max_new_tokens": 33, "temperature": 0.9, "top_p": 0.8, "seed": 5, "logprobs": 1},
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_with_drafts_gets_what_it_gets_without(kind: str) -> None:
    model = replace(ours(KINDS[kind]), eos_ids=frozenset({2}))
    stop = alone(model, prompt(9, 5), 20, ends=frozenset())[0][9]
    requests = mixed(stop)
    plain = asked(model, requests, None)
    wholes = [[*request["prompt"], *tokens] for request, one in zip(requests, plain) for tokens in one.tokens]
    for right in (0.0, 0.8):
        drafted = asked(model, requests, always(Knowing(wholes, right), VOCAB, depth=7))
        for one, other in zip(plain, drafted):
            same(one, other)
        accepted = sum(one.usage.accepted for one in drafted)
        assert accepted > 20 if right else sum(one.usage.drafted for one in drafted) > accepted
    assert plain[0].tokens == [alone(model, prompt(30, 1), 25, ends=frozenset())[0]]


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_verdict_that_fails_takes_no_token_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(ours(KINDS[kind]), eos_ids=frozenset({2}))
    requests = mixed(3)
    plain = asked(model, requests, None)
    wholes = [[*request["prompt"], *tokens] for request, one in zip(requests, plain) for tokens in one.tokens]
    commit, verdicts = State.commit, []

    def fail(state: State, counts: Any = None) -> None:
        if counts is not None:  # a draft's
            verdicts.append(counts)
            if len(verdicts) % 3 == 1:
                raise MemoryError("of a verdict")
        commit(state, counts)

    monkeypatch.setattr(State, "commit", fail)
    for one, other in zip(plain, asked(model, requests, always(Knowing(wholes, 0.8), VOCAB, depth=7))):
        same(one, other)
    assert len(verdicts) > 3


@pytest.mark.parametrize("draft", ["auto", "text", "none", "model", "two methods"])
def test_every_drafter_changes_nothing_but_speed(draft: str) -> None:
    model = ours("qwen3_next-dense")
    requests = [{"prompt": prompt(9, seed) * 3, "max_new_tokens": 40, "ignore_eos": True} for seed in range(5)]
    plain = asked(model, requests, None, rows=2)
    drafter: Any = draft
    if draft == "model":
        drafter = ours("llama")
    elif draft == "two methods":
        drafter = TwoMethods()
    for one, other in zip(plain, asked(model, requests, drafter, rows=2)):
        same(one, other)


class TwoMethods:
    """A drafter that cannot be told of ends."""

    def __init__(self) -> None:
        self.inner = TextDrafter()
        self.seen: set[int] = set()

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        self.inner.observe(rows, accepted)

    def propose(self, rows: Sequence[int], depth: int) -> list[Any]:
        self.seen |= set(rows)
        return list(self.inner.propose(rows, depth))


def test_a_row_of_a_drafter_that_does_not_forget_never_gets_another_text() -> None:
    drafter = TwoMethods()
    requests = [{"prompt": [5, 6, 7] * 4, "max_new_tokens": 12, "ignore_eos": True} for _ in range(5)]
    asked(ours("llama"), requests, always(drafter, VOCAB), rows=2)
    assert drafter.seen == {0, 1, 2, 3, 4}


def test_a_drafting_model_forgets_rows_that_ended() -> None:
    model = ours("llama")
    requests = [{"prompt": prompt(20 + seed, seed), "max_new_tokens": 12, "ignore_eos": True} for seed in range(6)]
    speculator = Speculator(ModelDrafter(model, 2, VOCAB, reading=8), VOCAB, 1, depth=4)
    drafted = asked(model, requests, speculator, rows=2)
    assert sum(one.usage.accepted for one in drafted) > 20
    for one, other in zip(asked(model, requests, None, rows=2), drafted):
        same(one, other)


def test_a_drafter_that_fails_stops_no_request() -> None:
    class Failing(TwoMethods):
        def propose(self, rows: Sequence[int], depth: int) -> list[Any]:
            raise RuntimeError("no idea")

    model = ours("llama")
    with pytest.warns(UserWarning, match="no idea"):
        (got,) = asked(model, [{"prompt": [1, 2], "max_new_tokens": 9}], always(Failing(), VOCAB))
    assert got.tokens == [alone(model, [1, 2], 9)[0]]


def test_a_grammar_that_cannot_go_back_ends_its_request_and_no_other() -> None:
    class Forward(OneOrMore):
        def rollback(self, count: int) -> None:
            raise RuntimeError("forward only")

        def copy(self) -> Forward:
            return Forward(self.at)

    with lmstate.Engine(
        ours("llama"), draft=always(Knowing([[3, 4, 7, 7, 7, 7], [1, 5, 5, 5, 5]], 1.0), VOCAB)
    ) as engine:
        go = paused(engine)
        bad = engine.submit([3, 4], grammar=Forward(), logit_bias={7: 99.0}, max_new_tokens=9)
        good = engine.submit([1, 5], logit_bias={5: 99.0}, max_new_tokens=9)
        go.set()
        assert good.result(600).tokens == [[5] * 9]
        with pytest.raises(RuntimeError, match="forward only"):
            bad.result(600)


def test_a_name_in_the_place_of_the_model_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"lmstate.load\('smollm2'\)"):
        lmstate.Engine("smollm2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"which lmstate.load gives; 5 was given"):
        lmstate.Engine(5)  # type: ignore[arg-type]


def test_what_is_no_drafter_is_refused_when_the_engine_is_made() -> None:
    with pytest.raises(ValueError, match="draft"):
        lmstate.Engine(ours("llama"), draft="fast")


def test_an_answer_that_was_given_before_is_drafted_from_the_earlier_one() -> None:
    model = ours("llama")
    request = {"prompt": prompt(30, 1), "max_new_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    with lmstate.Engine(model, draft="text") as engine:
        assert engine._drafting._speculator is not None
        engine._drafting._speculator._fixed = 7  # whatever it costs
        first = engine.submit(**request).result(600)
        second = engine.submit(**request).result(600)
    assert (
        second.tokens
        == first.tokens
        == [alone(model, request["prompt"], 40, Sampler(1.0, seed=3), ends=frozenset())[0]]
    )
    assert second.usage.accepted > 30 > first.usage.accepted


def test_forced_tokens_of_a_grammar_come_with_log_probabilities_in_one_step() -> None:
    model = ours("llama")
    texts = [[5, 6, 7, 8, 9, 5, 5, 5], [12, 13, 14, 14, 14]]
    request = {"prompt": [3, 4], "grammar": OneOf(texts), "temperature": 1.5, "seed": 1, "n": 4}
    for draft in (None, "text"):
        plain, told = asked(model, [request, {**request, "logprobs": 0}], draft)
        assert told.tokens == plain.tokens and told.finished == ["stop"] * 4
        assert told.usage.accepted > 8
        assert told.logprobs is not None
        for tokens, entries in zip(told.tokens, told.logprobs):
            assert [entry.token for entry in entries] == tokens
            for at, entry in enumerate(entries):
                logits = model([[3, 4, *tokens[:at]]])[0, -1]
                assert entry.logprob == pytest.approx(float(logits.log_softmax(-1)[tokens[at]]), abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_a_grammar_bounds_drafts_of_anything(seed: int) -> None:
    """Drafts that the grammar refuses part of, and that run into its end: masks and forced tokens stay in step."""
    model, rng = ours("mamba2"), random.Random(seed)
    texts = [[rng.choice([5, 6]) for _ in range(rng.randint(3, 12))] for _ in range(12)]
    requests = [
        {"prompt": prompt(7, n), "grammar": OneOf(texts), "temperature": 1.0, "seed": n, "logprobs": n % 2 or None}
        for n in range(6)
    ]
    plain = asked(model, requests, None)
    wholes = [[*request["prompt"], *rng.choice(texts)] for request in requests]
    wholes += [[*request["prompt"], *tokens] for request, one in zip(requests, plain) for tokens in one.tokens]
    for one, other in zip(plain, asked(model, requests, always(Knowing(wholes, 0.9), VOCAB, depth=7))):
        same(one, other)
        assert one.tokens[0] in texts
