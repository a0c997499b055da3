"""Requests in one batch: each gets what it gets alone, whoever joins, leaves, is cancelled or fails beside it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from threading import Event

import pytest
import torch

import lmstate
from lmstate.engine import EngineClosed, QueueFull
from lmstate.engine.rows import RowPool
from lmstate.errors import ModelError
from lmstate.generation.sampling import Sampler
from lmstate.models.forward import Forward
from tests.engine.alone import alone
from tests.zoo import VOCAB, ours, text

KINDS = {
    "attention": "llama",
    "window": "mistral",
    "latent": "deepseek_v3",
    "compressed": "deepseek_v4",
    "hybrid": "qwen3_next-dense",
    "state space": "mamba2",
}


def prompt(length: int, seed: int) -> list[int]:
    return text(length, seed=seed)[0].tolist()


def paused(engine: lmstate.Engine) -> Event:
    """Hold the engine's thread until the event is set, so that what is submitted now starts together."""
    go = Event()
    engine.call(lambda _: go.wait(600))
    return go


@pytest.mark.parametrize("kind", KINDS)
def test_each_request_of_a_batch_gets_what_it_gets_alone(kind: str) -> None:
    model = ours(KINDS[kind])
    lengths = [3, 40, 17, 90, 5, 26]
    with lmstate.Engine(model, rows=4) as engine:
        requests = [
            engine.submit(prompt(length, seed), max_new_tokens=4 + 3 * seed, logprobs=2)
            for seed, length in enumerate(lengths)
        ]
        for seed, (request, length) in enumerate(zip(requests, lengths)):
            got = request.result(600)
            tokens, logprobs, why = alone(model, prompt(length, seed), 4 + 3 * seed, guess=got.tokens[0])
            assert got.tokens == [tokens]
            assert got.finished == [why]
            assert got.logprobs is not None
            assert [entry.logprob for entry in got.logprobs[0]] == pytest.approx(logprobs, abs=1e-4)
            assert got.usage.prompt == length


def test_answers_of_one_prompt_draw_as_rows_of_one_seed() -> None:
    model = ours("llama")
    ids = prompt(20, 1)
    with lmstate.Engine(model, rows=3) as engine:
        got = engine.submit(ids, n=5, max_new_tokens=12, temperature=1.1, top_k=20, seed=7).result(600)
    sampler = Sampler(1.1, 20, seed=7)
    assert got.tokens == [alone(model, ids, 12, sampler, index)[0] for index in range(5)]


def test_penalties_and_bias_change_what_is_picked_as_they_do_alone() -> None:
    model = ours("llama")
    ids = prompt(9, 3)
    sampler = Sampler(0.0, presence_penalty=0.7, frequency_penalty=0.4, logit_bias=((5, 3.0), (9, -100.0)))
    with lmstate.Engine(model) as engine:
        got = engine.submit(
            ids, max_new_tokens=30, presence_penalty=0.7, frequency_penalty=0.4, logit_bias={5: 3.0, 9: -100.0}
        ).result(600)
        plain = engine.submit(ids, max_new_tokens=30).result(600)
    assert got.tokens[0] == alone(model, ids, 30, sampler)[0] != plain.tokens[0]


def test_stop_tokens_end_an_answer_and_minimum_tokens_hold_them_off() -> None:
    model = ours("llama")
    ids = prompt(9, 3)
    whole = alone(model, ids, 20, ends=frozenset())[0]
    stop = whole[4]
    first = whole.index(stop)
    with lmstate.Engine(model) as engine:
        got = engine.submit(ids, max_new_tokens=20, stop_token_ids=[stop], ignore_eos=True).result(600)
        assert (got.tokens, got.finished, got.stopped_by) == ([whole[:first]], ["stop"], [stop])
        later = engine.submit(ids, max_new_tokens=20, stop_token_ids=[stop], ignore_eos=True, min_tokens=15).result(600)
        assert stop not in later.tokens[0][:15]
        assert len(later.tokens[0]) >= 15


@pytest.mark.parametrize("case", ["mistral", "llama-dynamic", "llama-longrope"])
def test_log_probabilities_of_a_prompt_are_those_of_the_plain_forward(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmstate.engine.prefill.ECHO_CHUNK", 24)
    model = ours(case)
    ids = prompt(80, 5)  # longer than what the ropes of the last two keep their frequencies for
    expected = model([ids])[0].log_softmax(-1)
    with lmstate.Engine(model) as engine:
        engine.submit(ids[:70], max_new_tokens=1).result(600)
        got = engine.submit(ids, max_new_tokens=0, prompt_logprobs=3).result(600).prompt_logprobs
    assert got is not None and got[0] is None and len(got) == len(ids)
    for position, entry in enumerate(got[1:], 1):
        assert entry is not None and entry.token == ids[position]
        assert entry.logprob == pytest.approx(float(expected[position - 1, ids[position]]), abs=1e-4)
        assert entry.top[0][1] == pytest.approx(float(expected[position - 1].max()), abs=1e-4)


@pytest.mark.parametrize("case", ["llama-dynamic", "llama-longrope"])
def test_a_prompt_that_outgrows_its_rope_is_rotated_for_its_length_from_its_first_chunk(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[int] = []
    plan = lmstate.State.plan_backlog
    monkeypatch.setattr(
        lmstate.State, "plan_backlog", lambda self, ids, *rest: (again.extend(map(len, ids)), plan(self, ids, *rest))[1]
    )
    monkeypatch.setattr("lmstate.engine.pace.MOST", 24)
    model = ours(case)
    texts = [prompt(60, 1) + prompt(40, seed) for seed in (2, 3)]
    expected = [alone(model, ids, 1)[0] for ids in texts]
    with lmstate.Engine(model) as engine:
        again.clear()  # a row's bytes are measured with a backlog
        for ids, answer in zip(texts, expected):
            done = engine.submit(ids, max_new_tokens=1).result(600)
            assert done.tokens == [answer] and not again, "nothing was computed twice"
        assert done.usage.reused == 60, "what was read of a text of the same frequencies"
        assert engine.explain(prompt(60, 1)).reused == 0, "a short text has others"


def test_a_cancelled_request_ends_with_what_it_has_and_disturbs_nobody() -> None:
    model = ours("qwen3_next-dense")
    with lmstate.Engine(model, rows=3) as engine:
        long = engine.submit(prompt(30, 1), max_new_tokens=100_000, ignore_eos=True)
        other = engine.submit(prompt(30, 2), max_new_tokens=25)
        for _ in zip(range(5), long):
            pass
        long.cancel()
        got = long.result(600)
        assert got.finished == ["cancelled"]
        assert got.tokens[0][:5] == alone(model, prompt(30, 1), 5, ends=frozenset())[0]
        assert other.result(600).tokens == [alone(model, prompt(30, 2), 25)[0]]
        waiting = engine.submit(prompt(3, 3), max_new_tokens=5)
        assert waiting.result(600).tokens == [alone(model, prompt(3, 3), 5)[0]]


def test_a_request_that_waits_can_be_cancelled_and_a_full_queue_says_so() -> None:
    with lmstate.Engine(ours("llama"), rows=1, queue=2) as engine:
        go = paused(engine)
        first, second = (engine.submit([1, 2, 3], max_new_tokens=3) for _ in range(2))
        with pytest.raises(QueueFull, match="2 requests wait"):
            engine.submit([1, 2, 3])
        second.cancel()
        go.set()
        assert second.result(600).finished == ["cancelled"]
        assert second.result().tokens == [[]]
        assert len(first.result(600).tokens[0]) == 3


def test_larger_priorities_start_first() -> None:
    with lmstate.Engine(ours("llama"), rows=1) as engine:
        go = paused(engine)
        ended: list[int] = []
        requests = [engine.submit([1, 2, 3], max_new_tokens=2, priority=level) for level in (0, 5, 1, 5)]
        for number, request in enumerate(requests):
            request.when_done(lambda _, number=number: ended.append(number))
        go.set()
        for request in requests:
            request.result(600)
        engine.call(lambda _: None).result(600)  # who waits for a result may hear of it before the callback
        assert ended == [1, 3, 2, 0]


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("lmstate.engine.job.perf_counter", lambda: now)
    with lmstate.Engine(ours("llama"), rows=1) as engine:
        running = engine.submit([1, 2, 3], max_new_tokens=10**6, ignore_eos=True, deadline=0.5)
        waiting = engine.submit([1, 2, 3], max_new_tokens=5, deadline=0.1)
        next(iter(running))
        now = 0.2
        assert waiting.result(600).finished == ["deadline"]
        assert not running.done
        now = 0.6
        got = running.result(600)
        assert got.finished == ["deadline"]
        assert got.tokens[0]


def test_a_request_that_fails_again_while_it_ends_gives_its_row_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory ran out: what it computed cannot be kept either."""

    def fail(self: object, owner: object) -> None:
        raise MemoryError("no room for a snapshot")

    with lmstate.Engine(ours("llama"), rows=1) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(RowPool, "snapshot", fail)
            for _ in range(2):  # the second one needs the only row
                with pytest.raises(MemoryError, match="no room"):
                    engine.submit(prompt(5, 1), max_new_tokens=4).result(600)
        assert len(engine.submit(prompt(5, 2), max_new_tokens=4).result(600).tokens[0]) == 4
        assert engine.stats()["failed"] == 2


def test_the_model_runs_once_before_the_first_request_and_may_fail_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours("llama")
    ran: list[object] = []

    def forward(self: Forward, ids: object, *rest: object) -> None:
        ran.append(ids)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Forward, "__call__", forward)
        engine = lmstate.Engine(model)
    with engine:
        assert len(ran) == 1
        assert engine.submit(prompt(5, 1), max_new_tokens=4).result(600).tokens == [alone(model, prompt(5, 1), 4)[0]]
        stats = engine.stats()
        assert (stats["failed"], stats["prompt_tokens"]) == (0, 5)


def test_a_row_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours("llama")
    poison = 77
    whole = Forward.__call__

    def forward(self, ids, *rest):  # type: ignore[no-untyped-def]
        if any(poison in row for row in ids):
            raise RuntimeError("a bad token")
        return whole(self, ids, *rest)

    monkeypatch.setattr(Forward, "__call__", forward)
    with lmstate.Engine(model, rows=3) as engine:
        go = paused(engine)
        bad = engine.submit(prompt(8, 1), max_new_tokens=9, logit_bias={poison: 1000.0})
        good = engine.submit([1, 5, 3], max_new_tokens=9, logit_bias={poison: -1000.0})
        go.set()
        with pytest.raises(RuntimeError, match="a bad token"):
            bad.result(600)
        assert len(good.result(600).tokens[0]) == 9
        assert engine.stats()["failed"] == 1


def test_a_prompt_that_arrives_is_read_between_tokens_of_others() -> None:
    """A long prompt does not stop the others until it is read: they get tokens in between."""
    model = ours("llama")
    with lmstate.Engine(model, rows=2) as engine:
        stream = engine.submit([1, 2, 3], max_new_tokens=10**6, ignore_eos=True)
        for _ in zip(range(20), stream):
            pass
        made = list[int]()  # tokens of the stream when the prompt comes, and when it is read, whoever looks when

        def come(_: lmstate.Model) -> lmstate.engine.Request:
            made.append(len(stream._pieces))
            return engine.submit(prompt(140, 2) * 20, max_new_tokens=1)

        long = engine.call(come).result(600)
        long.when_done(lambda _: made.append(len(stream._pieces)))
        assert len(long.result(600).tokens[0]) == 1
        stream.cancel()
        assert stream.result(600).finished == ["cancelled"]
        assert made[1] - made[0] > 3


def test_pieces_come_in_asyncio_as_they_do_in_threads() -> None:
    model = ours("mamba2")

    async def main() -> None:
        async with lmstate.Engine(model, rows=4) as engine:
            requests = [engine.submit(prompt(10, seed), max_new_tokens=8) for seed in range(6)]

            async def tokens(request: lmstate.engine.Request) -> list[int]:
                return [token async for piece in request for token in piece.tokens]

            got = await asyncio.gather(*map(tokens, requests))
            ends = await asyncio.gather(*(request.wait() for request in requests))
            assert [[one] for one in got] == [end.tokens for end in ends]
            assert got == [alone(model, prompt(10, seed), 8)[0] for seed in range(6)]

    asyncio.run(main())


def test_a_closed_engine_ends_what_runs_and_takes_nothing_more() -> None:
    engine = lmstate.Engine(ours("llama"), rows=1)
    requests = [engine.submit([1, 2], max_new_tokens=10**6, ignore_eos=True) for _ in range(2)]
    engine.close()
    assert [request.result(600).finished for request in requests] == [["cancelled"], ["cancelled"]]
    with pytest.raises(EngineClosed):
        engine.submit([1, 2])
    engine.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": []}, "no tokens"),
        ({"prompt": [VOCAB]}, f"has token {VOCAB}"),
        ({"prompt": [[1], [2]]}, "one prompt"),
        ({"prompt": [1], "n": 0}, "n is 0"),
        ({"prompt": [1], "max_new_tokens": 3, "min_tokens": 4}, "min_tokens is 4, more than max_new_tokens"),
        ({"prompt": [1], "top_p": 0.0}, "top_p is 0.0"),
        ({"prompt": [1], "presence_penalty": float("nan")}, "presence_penalty"),
        ({"prompt": [1], "logit_bias": {VOCAB: 1.0}}, "logit_bias has token"),
        ({"prompt": [1], "stop": "x"}, "no tokenizer"),
        ({"prompt": [1], "deadline": -1}, "deadline"),
        ({"prompt": [1], "deadline": "soon"}, "deadline must be a number; 'soon'"),
        ({"prompt": [1], "temperature": "hot"}, "temperature must be a number; 'hot'"),
        ({"prompt": [1], "top_p": [1]}, "top_p must be a number"),
        ({"prompt": [1], "repetition_penalty": None}, "repetition_penalty must be a number"),
        ({"prompt": [1], "logit_bias": 5}, "logit_bias is 5; it must be a dict"),
        ({"prompt": [1], "logit_bias": {1: None}}, "logit_bias of token 1 must be a number"),
        ({"prompt": [1], "seed": "abc"}, "seed must be a whole number; 'abc'"),
        ({"prompt": [1], "stop": 5}, "stop is 5; it must be a text"),
        ({"prompt": [1], "stop_token_ids": 5}, "stop_token_ids was given 5"),
        ({"prompt": [1], "grammar": 5}, "grammar is 5"),
        ({"prompt": [1], "grammar": "json"}, "has no tokenizer"),
        ({"prompt": [1], "priority": 10**309}, "priority is 1000"),
        ({"prompt": [1], "temperature": 10**400}, "temperature must be a number"),
        ({"prompt": [1], "ignore_eos": "no"}, "ignore_eos must be True or False; 'no'"),
        ({"prompt": b"ab"}, "is bytes: decode them first"),
    ],
)
def test_bad_requests_are_refused_when_they_are_made(given: dict, said: str) -> None:
    with lmstate.Engine(ours("llama")) as engine:
        with pytest.raises(ValueError, match=said):
            engine.submit(**given)
        assert engine.stats()["requests"] == 0


def test_what_are_no_messages_is_refused() -> None:
    with lmstate.Engine(ours("llama")) as engine:
        for wrong in ["x", [1, 2], [], None]:
            with pytest.raises(ValueError, match="chat messages are a list of dicts"):
                engine.encode(wrong)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="chat messages are a list of dicts"):
                engine.remember(wrong, [1])  # type: ignore[arg-type]
        for answer in ["y", [VOCAB], [0.5]]:
            with pytest.raises(ValueError, match=r"the answer|token id"):
                engine.remember([{"role": "user", "content": "x"}], answer)  # type: ignore[arg-type]


class OneOf:
    """A grammar: tokens of a few fixed texts."""

    def __init__(self, texts: list[list[int]], at: tuple[int, ...] = ()) -> None:
        self.texts, self.at = texts, at

    def _next(self) -> set[int]:
        n = len(self.at)
        return {text[n] for text in self.texts if tuple(text[:n]) == self.at and len(text) > n}

    @property
    def ended(self) -> bool:
        return not self._next()

    complete = ended

    def allowed(self) -> torch.Tensor:
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[list(self._next())] = True
        return mask

    def accept(self, token: int) -> None:
        self.at += (token,)

    def rollback(self, count: int) -> None:
        self.at = self.at[: len(self.at) - count]

    def forced(self) -> list[int]:
        forced: list[int] = []
        walk = OneOf(self.texts, self.at)
        while len(ways := walk._next()) == 1:
            walk.accept(token := ways.pop())
            forced.append(token)
        return forced

    def copy(self) -> OneOf:
        return OneOf(self.texts, self.at)


class OneOrMore(OneOf):
    """A grammar whose mask says nothing of the end: `complete` does."""

    def __init__(self, at: tuple[int, ...] = ()) -> None:
        super().__init__([], at)

    ended = False  # type: ignore[assignment]

    @property
    def complete(self) -> bool:  # type: ignore[override]
        return len(self.at) >= 3

    def _next(self) -> set[int]:
        return {7, 8}

    def copy(self) -> OneOrMore:
        return OneOrMore(self.at)


def test_an_answer_may_end_only_where_its_grammar_is_complete() -> None:
    model = replace(ours("llama"), eos_ids=frozenset({2}))
    with lmstate.Engine(model) as engine:
        got = engine.submit([3, 4], grammar=OneOrMore(), logit_bias={2: 1000.0}, max_new_tokens=20).result(600)
    assert got.finished == ["eos"]
    assert len(got.tokens[0]) == 3 and set(got.tokens[0]) <= {7, 8}


def test_a_grammar_bounds_each_answer_and_its_forced_tokens_come_at_once() -> None:
    texts = [[5, 6, 7, 8, 9], [5, 6, 10, 11], [12, 13, 14]]
    with lmstate.Engine(ours("llama"), rows=2) as engine:
        got = engine.submit([3, 4], n=6, temperature=1.5, seed=1, grammar=OneOf(texts)).result(600)
    assert all(tokens in texts for tokens in got.tokens)
    assert len({tuple(tokens) for tokens in got.tokens}) > 1
    assert got.finished == ["stop"] * 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_outside_a_grammar_comes_where_a_bias_rules_out_those_in_it(temperature: float) -> None:
    bias = {5: float("-inf"), 12: float("-inf")}
    with lmstate.Engine(ours("llama")) as engine:
        request = engine.submit([3, 4], grammar=OneOf([[5, 6], [12, 13]]), logit_bias=bias, temperature=temperature)
        with pytest.raises(ModelError, match="rules out"):
            request.result(600)
