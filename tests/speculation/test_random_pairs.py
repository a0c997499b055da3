"""Random pairs of a model and a drafter, over every family: the tokens, ends and states of plain decoding.

`make soak` runs 500 of them, the suite a sample.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import lmstate
from lmstate.generation import Generation, Sampler
from lmstate.ops import dispatch
from lmstate.speculation import ModelDrafter, TextDrafter
from tests.generation.fake_model import FakeTokenizer
from tests.speculation.drafters import NoisyOracle, always
from tests.speculation.test_greedy import KINDS, prompts_of, whole_texts
from tests.zoo import CASES, VOCAB, ours

ROWS = 3
SAMPLE = [case for case in KINDS if case in CASES] + ["llama", "qwen3_5", "mamba2", "deepseek_v3", "gemma3", "rwkv"]
EXACT = dispatch.choice().library is not None  # torch's products and activations round by the number of rows


@cache
def speaking(case: str) -> lmstate.Model:
    return replace(ours(case), _tokenizer=FakeTokenizer(), eos_ids=frozenset())  # type: ignore[arg-type]


def drafter(rng: random.Random, model: lmstate.Model, wholes: list[list[int]]) -> Any:
    kind = rng.randrange(4)
    if kind == 0:
        return ModelDrafter(rng.choice([model, speaking(rng.choice(["llama", "qwen3_5"]))]), ROWS, VOCAB)
    if kind == 1:
        return TextDrafter(corpus=[whole[rng.randrange(len(whole)) :] for whole in wholes])
    return NoisyOracle(wholes, rng.choice([0.0, 0.5, 0.8, 0.95, 1.0]), VOCAB, seed=rng.randrange(99))


def run(model: lmstate.Model, prompts: list[list[int]], state: lmstate.State, draft: Any, options: Any) -> Generation:
    generation = Generation(model, prompts, state, draft=draft, **options)
    for _ in generation:
        pass
    return generation


def chosen_options(rng: random.Random) -> dict[str, Any]:
    """Greedy mostly; a stop string or an end of text may come at any token, also inside a draft."""
    sampler = Sampler()
    if rng.random() < 0.3:
        sampler = Sampler(repetition_penalty=1.3)
    if rng.random() < 0.2:
        sampler = Sampler(rng.choice([0.7, 1.2]), top_p=0.9, repetition_penalty=1.1, seed=rng.randrange(99))
    stop = tuple(bytes([rng.randrange(VOCAB - 1)]).decode("latin-1") for _ in range(rng.choice([0, 0, 2])))
    return {"params": sampler, "stop": stop, "max_new_tokens": rng.randint(1, 16)}


def check_pair(case: str, seed: int) -> None:
    rng = random.Random(f"{case}{seed}")
    model = replace(speaking(case), eos_ids=frozenset(rng.sample(range(VOCAB), rng.choice([0, 0, 3]))))
    capacity = rng.choice([None, None, 48])
    plain, state = (model.new_state(rows=ROWS, capacity=capacity) for _ in range(2))
    prompts = prompts_of(*(rng.randint(1, 20) for _ in range(ROWS)), seed=seed)
    for turn in range(3):
        options = chosen_options(rng)
        before = [text + prompt for text, prompt in zip(whole_texts(plain), prompts)]
        one = run(model, prompts, plain, None, options)
        # Of an answer that a stop string or an end has cut, the drafter knows what would have come.
        wholes = [[*text, *answer.tokens, *[7] * 9] for text, answer in zip(before, one._rows)]
        two = run(model, prompts, state, always(drafter(rng, model, wholes), VOCAB, ROWS, rng.randint(1, 9)), options)
        assert two.texts == one.texts and two.ids == one.ids
        assert two.report().finished == one.report().finished
        assert whole_texts(state) == whole_texts(plain)
        back, row = rng.randint(0, 12), rng.randrange(ROWS)
        order = rng.choice([[0, 1, 2], [2, 2, 0], [1, 0, 0], [0, None, 1]])
        prompts = prompts_of(*(rng.randint(1, 4) for _ in range(ROWS)), seed=seed + turn + 50)
        for each in (plain, state):
            each.select(order)
            each.rewind(row, max(0, each.lengths[row] - back))
            if capacity is not None and max(each.lengths) > capacity - 5:
                for full in range(ROWS):
                    each.rewind(full, min(each.lengths[full], 20))
    idle: list[list[int]] = [[], [], []]
    with torch.no_grad():
        expected, got = model(idle, plain), model(idle, state)
    if EXACT:
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())  # type: ignore[union-attr]
    else:
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("seed", "case"), list(enumerate(SAMPLE)))
def test_a_random_pair_gives_what_the_model_gives_alone(case: str, seed: int) -> None:
    check_pair(case, seed)


@pytest.mark.soak
@pytest.mark.parametrize("case", sorted(CASES))
def test_500_random_pairs_give_what_the_model_gives_alone(case: str) -> None:
    for seed in range(1000, 1000 + -(-500 // len(CASES))):
        check_pair(case, seed)
