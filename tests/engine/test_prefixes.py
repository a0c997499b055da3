"""Reuse of prefixes: nothing is computed twice that need not be, nothing changes by it, and the budget holds."""

from __future__ import annotations

import random

import pytest

import lmstate
from lmstate.engine import Completion
from lmstate.engine.memory import RowCost
from lmstate.engine.options import as_bytes
from tests.engine.alone import alone
from tests.engine.test_batching import KINDS, paused, prompt
from tests.invariants.opened import opened
from tests.invariants.stretched import stretched
from tests.zoo import ours, text


def ask(engine: lmstate.Engine, ids: list[int], count: int = 6, **options) -> Completion:
    return engine.submit(ids, max_new_tokens=count, ignore_eos=True, logprobs=0, **options).result(600)


def check(model: lmstate.Model, ids: list[int], got: Completion) -> None:
    for tokens, told in zip(got.tokens, got.logprobs or [], strict=True):
        expected, logprobs, _ = alone(model, ids, len(tokens), ends=frozenset(), guess=tokens)
        assert tokens == expected
        assert [entry.logprob for entry in told] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_that_grows_computes_only_what_is_new(kind: str) -> None:
    model = ours(KINDS[kind])
    with lmstate.Engine(model, rows=2) as engine:
        ids = prompt(50, 1)
        for turn in range(4):
            got = ask(engine, ids)
            check(model, ids, got)
            if turn:
                # What the model said is there but for its last token, which nobody had read yet.
                assert got.usage.prompt - got.usage.reused == len(new) + 1  # noqa: F821
            new = prompt(9, 10 + turn)
            ids = [*ids, *got.tokens[0], *new]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_request_that_diverges_leaves_a_carry_there_so_that_the_third_reuses_all(kind: str) -> None:
    model = ours(KINDS[kind])
    system = prompt(70, 1)
    with lmstate.Engine(model, rows=2) as engine:
        reused = []
        for seed in range(3):
            ids = [*system, 90 + seed, *prompt(12, 20 + seed)]
            got = ask(engine, ids)
            check(model, ids, got)
            reused.append(got.usage.reused)
        assert reused[0] == 0
        assert reused[2] == len(system)
        if kind in ("attention", "latent"):
            assert reused[1] == len(system)
        else:
            told = engine.explain([*system, 98, 1])
            assert told.reused == told.matched == len(system)


def test_a_hybrid_says_why_it_computes_what_it_knows() -> None:
    model = ours("qwen3_next-dense")
    system = prompt(40, 1)
    with lmstate.Engine(model) as engine:
        ask(engine, [*system, 5, 6, 7])
        told = engine.explain([*system, 9, 9, 9])
        assert (told.reused, told.matched, told.differs_at) == (0, 40, 40)
        assert told.forced_by in ("convolution", "fold", "gated delta", "composite") or told.forced_by is not None


def test_requests_that_arrive_together_read_what_they_share_once() -> None:
    for kind in KINDS.values():
        model = ours(kind)
        system = prompt(80, 1)
        with lmstate.Engine(model, rows=5) as engine:
            go = paused(engine)
            asked = [[*system, 90 + seed, *prompt(8, 30 + seed)] for seed in range(5)]
            requests = [engine.submit(ids, max_new_tokens=5, logprobs=0, ignore_eos=True) for ids in asked]
            go.set()
            for ids, request in zip(asked, requests):
                check(model, ids, request.result(600))
            new = len(system) + 5 * 9
            assert engine.stats()["computed_tokens"] == new


def test_the_same_prompt_again_computes_nothing() -> None:
    for kind in KINDS.values():
        model = ours(kind)
        ids = prompt(30, 3)
        with lmstate.Engine(model) as engine:
            first = ask(engine, ids)
            again = ask(engine, ids)
            assert again.tokens == first.tokens
            assert again.usage.reused == len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cleared_is_computed_again_but_for_what_sessions_need(kind: str) -> None:
    model = ours(KINDS[kind])
    with lmstate.Engine(model, rows=2) as engine:
        texts, session = [prompt(60, seed) for seed in (1, 2)], engine.session("s")
        texts.append([*texts[0][:30], *prompt(20, 3)])
        session.send(texts[0], max_new_tokens=4, ignore_eos=True).result(600)
        for ids in texts[1:]:
            ask(engine, ids)
        engine.clear_prefixes()
        held = engine.call(lambda _: (engine._reuse.prefixes.nbytes, engine._reuse.prefixes.counted())).result()
        assert held[0] == held[1]
        assert [engine.explain(ids).matched for ids in texts] == [60, 0, 30]
        more = session.send(prompt(5, 4), max_new_tokens=4, logprobs=0).result(600)
        assert more.usage.reused >= 60
        check(model, session.tokens[: 60 + 4 + 5], more)
        again = ask(engine, texts[1])
        assert again.usage.reused == 0
        check(model, texts[1], again)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [140_000, 250_000, "1GiB"])
def test_any_traffic_at_any_budget_gives_what_each_request_gets_alone(kind: str, memory: int | str) -> None:
    model = ours(KINDS[kind])
    dice = random.Random(f"{kind} {memory}")
    texts: list[list[int]] = []
    least = RowCost.of(model, model.new_state)(134)  # of the longest request, alone
    with lmstate.Engine(model, rows=3, memory=max(as_bytes(memory), least)) as engine:
        for _ in range(12):
            asked = []
            for _ in range(dice.randint(1, 4)):
                base = dice.choice(texts) if texts and dice.random() < 0.8 else []
                base = base[: dice.randint(0, len(base))] if dice.random() < 0.5 else base
                ids = [*base[:100], *prompt(dice.randint(1, 25), dice.randint(0, 10**6))]
                asked.append((ids, engine.submit(ids, max_new_tokens=dice.randint(0, 8), logprobs=0, ignore_eos=True)))
            if dice.random() < 0.3:
                dice.choice(asked)[1].cancel()
            for ids, request in asked:
                got = request.result(600)
                check(model, ids, got)
                texts.append([*ids, *got.tokens[0]])
            held = engine.call(lambda _: (engine._reuse.prefixes.nbytes, engine._reuse.prefixes.counted())).result()
            assert held[0] == held[1]
            assert held[0] <= engine._reuse.prefixes.limit <= engine._reuse.memory
        if memory == "1GiB":
            assert engine.stats()["reused_tokens"] > 0


def test_trees_of_lengths_that_nobody_asks_for_any_more_go() -> None:
    model = stretched("llama", continuous=True)  # each length has its own frequencies, and so its own tree
    with lmstate.Engine(model, rows=1, memory="1MiB") as engine:
        store = engine._reuse.prefixes
        for length in range(80, 140):
            ask(engine, prompt(length, length), 1)
        assert store.counts["evicted"] > 0
        kept = {key for key, _ in store.nodes()}
        assert len(store._roots) <= len(kept) + 5


def test_a_tree_names_learned_positions() -> None:
    model = opened("llama", keys=False, positions=11)
    with lmstate.Engine(model) as engine:
        engine.submit(text(9)[0].tolist(), max_new_tokens=2).result(600)
        assert "[11 learned positions]" in engine.tree() and "picture" not in engine.tree()
