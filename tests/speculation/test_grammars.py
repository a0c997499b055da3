"""Grammars in `generate`: every token is the best that may come, with and without drafts, and forced ones are free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import lmstate
from lmstate.generation import Generation, Sampler
from lmstate.generation.grammar import admitted
from lmstate.speculation import Draft, ModelDrafter
from tests.engine.test_batching import OneOf, OneOrMore
from tests.speculation.drafters import NoisyOracle, always
from tests.speculation.test_greedy import prompts_of, run, speaking, whole_texts
from tests.zoo import VOCAB

TEXTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5], [5, 6, 7, 9, 9], [12, 13, 14, 14, 14, 15, 16], [12, 5, 5, 6, 6, 7]]


def masked(model: lmstate.Model, prompt: Sequence[int], grammar: OneOf) -> list[int]:
    """The greedy answer under a grammar, every token from the plain forward over all before it."""
    answer: list[int] = []
    while not grammar.ended:
        logits = model([[*prompt, *answer]])
        assert logits is not None
        answer.append(int(logits[0, -1].masked_fill(~grammar.allowed(), float("-inf")).argmax()))
        grammar.accept(answer[-1])
    return answer


@pytest.mark.parametrize("case", ["llama", "qwen3_5", "mamba2"])
def test_an_answer_under_a_grammar_is_the_best_that_may_come(case: str) -> None:
    model = speaking(case)
    prompts = prompts_of(7, 1, 12)
    expected = [masked(model, prompt, OneOf(TEXTS)) for prompt in prompts]
    wholes = [[*prompt, *answer] for prompt, answer in zip(prompts, expected)]
    for draft in (None, "text", always(NoisyOracle(wholes, 0.7, VOCAB), VOCAB, rows=3, depth=5)):
        state = model.new_state(rows=3)
        got = run(model, prompts, state, draft, grammar=OneOf(TEXTS))
        assert got.ids == expected and got.report().finished == ("stop",) * 3
        assert whole_texts(state) == wholes


def test_forced_tokens_need_no_drafter_and_no_step_of_their_own() -> None:
    model = speaking("llama")
    calls = []
    model.on_part = lambda done, width: calls.append(width) if not done else None
    state = model.new_state()
    got = Generation(model, [[3]], state, grammar=OneOf([[5, *range(20, 40)], [6, 6]]), draft=None)
    list(got)
    assert len(calls) == 2, "the prompt, and one step for all that is forced"


@pytest.mark.parametrize("seed", range(3))
def test_sampled_answers_of_a_seed_are_those_of_the_engine_whatever_is_drafted(seed: int) -> None:
    model = speaking("llama")
    sampler = Sampler(temperature=1.3, top_p=0.9, repetition_penalty=1.2, seed=seed)
    options = {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2, "seed": seed}
    prompt = prompts_of(9)[0]
    with lmstate.Engine(replace(model, _tokenizer=None)) as engine:
        expected = engine.submit(prompt, grammar=OneOf(TEXTS), **options).result(600).tokens[0]  # type: ignore[arg-type]
    assert expected in TEXTS
    for draft in (None, "text", always(NoisyOracle([[*prompt, *expected]], 0.8, VOCAB), VOCAB)):
        assert run(model, [prompt], model.new_state(), draft, params=sampler, grammar=OneOf(TEXTS)).ids == [expected]


def test_drafts_that_are_drawn_stay_within_the_grammar() -> None:
    model = speaking("llama")
    sampler = Sampler(temperature=1.5)
    seen = set()
    for _ in range(12):
        drafter = ModelDrafter(model, 1, VOCAB, sampler)
        got = run(model, [[3, 4]], model.new_state(), always(drafter, VOCAB), params=sampler, grammar=OneOf(TEXTS))
        assert got.ids[0] in TEXTS
        seen.add(tuple(got.ids[0]))
    assert len(seen) > 1


def test_an_answer_of_generate_ends_only_where_its_grammar_is_complete() -> None:
    model = speaking("llama")
    model.eos_ids = frozenset(range(VOCAB)) - {7, 8}
    got = run(model, [[3, 4]], model.new_state(), "text", grammar=OneOrMore(), max_new_tokens=20)
    assert got.report().finished == ("eos",) and len(got.ids[0]) == 3


def test_a_walk_along_a_draft_leaves_the_grammar_where_it_was() -> None:
    grammar = OneOf(TEXTS, (5,))
    assert admitted(grammar, Draft((6, 7, 8, 5, 6)), frozenset()).tokens == (6, 7, 8, 5, 6, 7, 8, 5)
    assert admitted(grammar, Draft((6, 7, 9, 1)), frozenset()).tokens == (6, 7, 9, 9)
    assert admitted(grammar, Draft((6, 9)), frozenset()).tokens == (6, 7)
    assert admitted(grammar, Draft((1,)), frozenset()).tokens == ()
    assert admitted(grammar, Draft((6, 7, 8)), frozenset({7})).tokens == (6,)
    assert grammar.at == (5,)
    drawn = Draft((1,), drawn_from=(torch.ones(VOCAB) / VOCAB,))
    assert admitted(grammar, drawn, frozenset()) is drawn
