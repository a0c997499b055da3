"""Shapes of agents' traffic: nothing is computed twice where there is memory for all, whatever the layers are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench.traces.run import run_trace

import lmstate
from tests.engine.test_batching import KINDS, prompt
from tests.engine.test_prefixes import ask, check
from tests.zoo import ours

END = 1


@pytest.mark.parametrize("name", ["conversation", "agents"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_computes_little_more_than_what_is_new(kind: str, name: str) -> None:
    run = run_trace(replace(ours(KINDS[kind]), eos_ids=frozenset({END})), name, "4GiB")
    assert run.prompt_tokens > 3 * run.new, "the trace has little to reuse"
    assert run.computed / run.new <= 1.02


@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
def test_a_text_that_is_cut_anywhere_costs_at_most_the_way_back_to_a_carry(kind: str) -> None:
    run = run_trace(ours(KINDS[kind]), "cuts", "4GiB")
    # Layers that forget have no carry yet where a text first differs in its middle.
    assert run.computed / run.new <= (1.02 if kind == "attention" else 1.5)


def test_a_long_prompt_leaves_carries_at_ends_of_turns_the_farther_back_the_fewer() -> None:
    model = replace(ours("qwen3_next-dense"), eos_ids=frozenset({END}))
    turns = [[*prompt(9, seed), END] for seed in range(12)]
    whole = [token for turn in turns for token in turn]
    with lmstate.Engine(model) as engine:
        ask(engine, [*whole, 5])
        found = {}
        for count in (11, 10, 9, 8, 6):  # edited after so many turns
            ids = [*(token for turn in turns[:count] for token in turn), 80 + count, 7]
            found[count] = engine.explain(ids).reused
            check(model, ids, ask(engine, ids, 2))
        assert found == {11: 110, 10: 90, 9: 90, 8: 50, 6: 50}


@pytest.mark.parametrize("kind", ["window", "hybrid", "state space"])
def test_a_session_that_comes_back_after_a_restart_rewinds_to_the_nearest_carry(kind: str, tmp_path: Path) -> None:
    model = ours(KINDS[kind])
    lengths = []
    with lmstate.Engine(model, store=tmp_path) as engine:
        session = engine.session("long")
        for seed in range(4):
            session.send(prompt(30, seed), max_new_tokens=5, ignore_eos=True).result(600)
            lengths.append(len(session.tokens))
    with lmstate.Engine(model, store=tmp_path) as engine:
        session = engine.session("long")
        for turn in (2, 0):
            session.rewind(lengths[turn] + 4)  # a few tokens into the next turn
            got = session.send([5, 6], max_new_tokens=3, ignore_eos=True, logprobs=0).result(600)
            check(model, session.tokens[:-3], got)
            assert got.usage.reused >= lengths[turn] - 1
