"""10,000 tokens with drafts: no drift and no growth, and a state of the bits of one that was never drafted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lmstate.generation import Sampler
from lmstate.ops import dispatch
from lmstate.speculation import TextDrafter
from tests.speculation.drafters import NoisyOracle, always
from tests.speculation.test_greedy import prompts_of, run, speaking, whole_texts
from tests.zoo import VOCAB

KINDS = ["llama", "gemma3", "deepseek_v3", "qwen3_5", "mamba2", "falcon_h1", "lfm2"]


def check(case: str, tokens: int, turns: int) -> None:
    """In several answers, so that a difference is found near to where it began."""
    model = replace(speaking(case), _tokenizer=None)
    sampler = Sampler(temperature=1.0, top_p=0.95, seed=5)  # greedy texts of small models soon go round in a circle
    plain, state = model.new_state(rows=2), model.new_state(rows=2)
    for turn in range(turns):
        prompts = prompts_of(5, 3, seed=turn)
        options = {"max_new_tokens": tokens // turns, "params": replace(sampler, seed=turn)}
        run(model, prompts, plain, None, **options)
        drafter = NoisyOracle(whole_texts(plain), 0.8, VOCAB, seed=turn) if turn % 3 else TextDrafter()
        speculator = always(drafter, VOCAB, rows=2, depth=6)
        run(model, prompts, state, speculator, **options)
        assert whole_texts(state) == whole_texts(plain)
        idle: list[list[int]] = [[], []]
        assert torch.equal(model(idle, state), model(idle, plain))  # type: ignore[arg-type]
        assert state.memory() == plain.memory()
    for row in range(2):
        one, two = plain.snapshot(row), state.snapshot(row)
        assert one.nbytes == two.nbytes
        for kept, other in zip(one.layers, two.layers):
            assert kept.keys() == other.keys()
            for name, tensor in kept.items():
                assert torch.equal(tensor, other[name]), name


@pytest.mark.skipif(dispatch.choice().library is None, reason="torch's products round by the number of rows")
@pytest.mark.parametrize("case", ["llama", "qwen3_5", "mamba2"])
def test_a_long_text_with_drafts_leaves_the_state_of_one_without(case: str) -> None:
    check(case, 240, turns=3)


@pytest.mark.soak
@pytest.mark.skipif(dispatch.choice().library is None, reason="torch's products round by the number of rows")
@pytest.mark.parametrize("case", KINDS)
def test_10000_tokens_with_drafts_leave_the_state_of_as_many_without(case: str) -> None:
    check(case, 10_000, turns=10)
