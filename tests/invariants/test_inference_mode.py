"""A state may be made, moved and fed under `torch.inference_mode` and outside of it, in any order."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from lmstate.ops.dispatch import references
from tests.faults.harness import KINDS, OPERATIONS, applies, draft
from tests.state.test_gradients import gradients, trainable
from tests.zoo import ours, text

MOVES = (
    "decode", "prefill", "rewind", "rewind far", "select", "fork", "restore", "drop", "mark", "copy", "tree", "draft",
)  # fmt: skip
Mode = Callable[[], AbstractContextManager[object]]


def moved(kind: str, modes: random.Random | None) -> list[Tensor]:
    """The logits of a text between random moves, each in inference mode or not, by chance; `None`: never."""
    case, options = KINDS[kind]
    model, chance, got = ours(case), random.Random(kind), []

    def mode() -> AbstractContextManager[object]:
        return torch.inference_mode(modes is not None and modes.random() < 0.5)

    with mode():
        state = model.new_state(2, rewind=8, **options)
    for seed in range(30):
        with mode():
            logits = model([text(n, seed=seed)[0].tolist() for n in (chance.choice((1, 9, 20)), 2)], state)
            assert logits is not None
            got.append(logits)
        move = chance.choice([each for each in MOVES if each not in OPERATIONS or applies(kind, each)])
        with mode():
            if move == "copy":
                state = copy.deepcopy(state)
            elif move == "tree" and not state.layout.static:
                model([[5, 6, 7], [8]], state, logits="all", commit=False, parents=[[-1, 0, 0], [-1]])
                with mode():
                    state.commit_path([[0, 2], [0]])
            elif move == "draft":
                draft(model, state)
                with mode():
                    state.commit([2, 1])
            elif move in OPERATIONS and min(state.lengths) > 9 and max(state.lengths) <= 44:  # some add 20 of 64
                OPERATIONS[move](model, state)
        if max(state.lengths) > 40:
            state.rewind(0, 9)
            state.rewind(1, min(9, state.lengths[1]))
    return got


@pytest.mark.parametrize("bodies", ["native", "references"])
@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_changes_no_logits_in_any_order(kind: str, bodies: str) -> None:
    if bodies == "references":
        with references():
            expected, got = moved(kind, None), moved(kind, random.Random(1))
    else:
        expected, got = moved(kind, None), moved(kind, random.Random(1))
    assert all(map(torch.equal, got, expected)) and len(got) == len(expected)


@pytest.mark.parametrize("case", ["llama", "qwen3_next"])
def test_a_gradient_follows_through_a_state_that_inference_mode_began(case: str) -> None:
    """What came before is a constant: as it is under `no_grad`."""
    model, leaves = trainable(case)
    found = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            state = model.new_state()
            model(text(20), state)
        logits = model(text(5, seed=1), state, logits="all")
        found.append(gradients(leaves, logits.square().mean()))
    assert found[0] and all(map(torch.equal, *found))
