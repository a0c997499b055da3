"""Greedy with drafts gives the tokens without, and leaves the same state, on every layer kind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import lmstate
from lmstate.generation import Generation, Sampler
from lmstate.ops import dispatch
from lmstate.speculation import ModelDrafter
from tests.generation.fake_model import FakeTokenizer
from tests.speculation.drafters import NoisyOracle, always
from tests.zoo import CASES, VOCAB, ours, text

KINDS = [
    "llama", "gemma3", "gemma3n", "gpt_oss", "mixtral", "qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "mamba",
    "mamba2", "falcon_h1", "jamba", "bamba", "nemotron_h", "zamba2", "lfm2", "deepseek_v3", "minimax", "rwkv", "xlstm",
    "recurrent_gemma", "bailing_hybrid", "llama4",
]  # fmt: skip


def speaking(case: str) -> lmstate.Model:
    return replace(ours(case), _tokenizer=FakeTokenizer(), eos_ids=frozenset())  # type: ignore[arg-type]


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    return [text(length, seed=seed + length)[0].tolist() for length in lengths]


def run(
    model: lmstate.Model, prompts: list[list[int]], state: lmstate.State, draft: object, **options: object
) -> Generation:
    generation = Generation(model, prompts, state, draft=draft, **options)  # type: ignore[arg-type]
    for _ in generation:
        pass
    return generation


def whole_texts(state: lmstate.State) -> list[list[int]]:
    return [state.tokens(row) for row in range(state.rows)]


@pytest.mark.parametrize("case", [case for case in KINDS if case in CASES])
def test_greedy_with_drafts_equals_greedy_without(case: str) -> None:
    """Ragged rows, drafts of any quality, and a rewind and a fork between two answers."""
    model = speaking(case)
    for right in (0.0, 0.6, 1.0):
        rng = random.Random(f"{case}{right}")
        plain, drafted = model.new_state(rows=3), model.new_state(rows=3)
        prompts = prompts_of(7, 1, 19)
        for turn in range(2):
            budget = rng.randint(5, 14)
            run(model, prompts, plain, None, max_new_tokens=budget)
            oracle = NoisyOracle(whole_texts(plain), right, VOCAB, seed=turn)
            run(model, prompts, drafted, always(oracle, VOCAB, rows=3, depth=5), max_new_tokens=budget)
            assert whole_texts(drafted) == whole_texts(plain)
            back, order = rng.randint(0, 9), rng.choice([[0, 1, 2], [2, 2, 0], [1, 0, 0]])
            for state in (plain, drafted):
                state.select(order)
                state.rewind(1, state.lengths[1] - back)
            prompts = prompts_of(3, 5, 2, seed=turn + 50)
        idle: list[list[int]] = [[], [], []]
        torch.testing.assert_close(model(idle, drafted), model(idle, plain), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "qwen3_5", "mamba2", "gemma3"])
def test_a_model_as_the_drafter_changes_no_token(case: str) -> None:
    model, other = speaking(case), speaking("llama")
    prompts = prompts_of(6, 11)
    plain = model.new_state(rows=2)
    run(model, prompts, plain, None, max_new_tokens=16)
    for drafting in (model, other):
        state = model.new_state(rows=2)
        speculator = always(ModelDrafter(drafting, 2, VOCAB), VOCAB, rows=2, depth=4)
        generation = Generation(model, prompts, state, draft=speculator, max_new_tokens=16)
        list(generation)
        assert whole_texts(state) == whole_texts(plain)
        report = generation.report().draft
        if drafting is model:
            assert report.accepted == report.drafted > 0
        assert report.drafted == sum(report.verified) and report.accepted == sum(report.held)


def test_a_drafting_model_that_is_kept_reads_what_is_new_of_a_conversation() -> None:
    model, drafting = speaking("qwen3_5"), speaking("llama")
    drafter = ModelDrafter(drafting, 1, VOCAB)
    read: list[int] = []
    drafting.on_part = lambda done, width: read.append(width)
    plain, state = model.new_state(), model.new_state()
    for turn in range(3):
        prompts = prompts_of(60 - 20 * turn, seed=turn)
        run(model, prompts, plain, None, max_new_tokens=10)
        read.clear()
        generation = run(model, prompts, state, always(drafter, VOCAB, depth=3), max_new_tokens=10)
        assert state.tokens(0) == plain.tokens(0)
        assert generation.report().draft.drafted > 0
        assert len(prompts[0]) <= max(read) <= len(prompts[0]) + 10
        for each in (plain, state):
            each.rewind(0, each.lengths[0] - 4)


@pytest.mark.parametrize("draft", ["auto", "text", "none", None])
def test_the_named_drafters_change_no_token(draft: str | None) -> None:
    model = speaking("qwen3_5")
    prompt = prompts_of(9)[0] * 3
    plain, state = model.new_state(), model.new_state()
    run(model, [prompt], plain, None, max_new_tokens=40)
    run(model, [prompt], state, draft, max_new_tokens=40)
    assert state.tokens(0) == plain.tokens(0)


@pytest.mark.parametrize(
    "policy",
    [
        lmstate.kv.Recent(budget=16, sinks=2, recent=8),
        lmstate.kv.H2O(budget=16, sinks=2, recent=8),
        lmstate.kv.Quantized(bits=8),
        lmstate.kv.Quantized(bits=4),
    ],
)
def test_drafts_under_storage_policies_change_no_token(policy: object) -> None:
    model = speaking("llama")
    prompts = prompts_of(30, 3)
    plain, state = model.new_state(rows=2, kv=policy), model.new_state(rows=2, kv=policy)
    run(model, prompts, plain, None, max_new_tokens=80)
    run(model, prompts, state, always(NoisyOracle(whole_texts(plain), 0.7, VOCAB), VOCAB, rows=2), max_new_tokens=80)
    assert whole_texts(state) == whole_texts(plain)


def test_drafts_stop_at_the_edge_of_capacity() -> None:
    model = speaking("qwen3_5")
    prompt = prompts_of(10)[0]
    plain, state = model.new_state(capacity=25), model.new_state(capacity=25)
    free = model.new_state()
    run(model, [prompt], free, None, max_new_tokens=30)
    without = run(model, [prompt], plain, None, max_new_tokens=30)
    oracle = NoisyOracle(whole_texts(free), 1.0, VOCAB)
    drafted = run(model, [prompt], state, always(oracle, VOCAB, depth=7), max_new_tokens=30)
    assert drafted.report().finished == without.report().finished == ("capacity",)
    assert drafted.texts == without.texts
    assert state.tokens(0) == plain.tokens(0) and state.lengths == [25]


@pytest.mark.skipif(dispatch.choice().library is None, reason="torch's products round by the number of rows")
@pytest.mark.parametrize("case", ["llama", "qwen3_5"])
def test_a_long_drafted_text_leaves_the_bits_of_a_plain_one(case: str) -> None:
    model = speaking(case)
    prompt = prompts_of(8)[0]
    plain, state = model.new_state(), model.new_state()
    run(model, [prompt], plain, None, max_new_tokens=400)
    run(model, [prompt], state, always(NoisyOracle(whole_texts(plain), 0.8, VOCAB), VOCAB), max_new_tokens=400)
    assert state.tokens(0) == plain.tokens(0)
    assert torch.equal(model([[]], state), model([[]], plain))  # type: ignore[arg-type]
    assert state.memory() == plain.memory()


def test_repetition_penalty_counts_each_accepted_token() -> None:
    model = speaking("llama")
    prompts = prompts_of(12, 5)
    sampler = Sampler(repetition_penalty=1.3)
    plain, state = model.new_state(rows=2), model.new_state(rows=2)
    run(model, prompts, plain, None, max_new_tokens=30, params=sampler)
    oracle = NoisyOracle(whole_texts(plain), 0.8, VOCAB)
    run(model, prompts, state, always(oracle, VOCAB, rows=2), max_new_tokens=30, params=sampler)
    assert whole_texts(state) == whole_texts(plain)
