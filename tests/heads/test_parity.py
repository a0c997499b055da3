"""Logits of multi-token prediction heads equal to those of `transformers` on the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.models.heads.head import parts
from lmstate.models.stack import run_eager
from tests.heads.zoo import HEADS, pair
from tests.zoo import text

BOUND = 1e-4


def logits_of(model: lmstate.Model, ids: Tensor) -> list[Tensor]:
    """Of each head, float32 `[R, n, V]`: after each token."""
    state = model.new_state(len(ids))
    step = state.plan(ids.tolist())
    count = len(model.blocks)
    stream = run_eager(model.blocks, model.network.embedded(ids, step), step, state.layers)
    exit = model.network.exit
    hidden = model.heads[0].reads(stream if exit is None else exit(stream), model.norm, [stream])
    logits = []
    for head, cache in zip(model.heads, state.layers[count:]):
        tail, blocks = parts(cache)
        stream = head.stream(tail.advance(hidden, step), ids, step, blocks)
        logits.append(head.logits(stream))
        hidden = head.handed_on(stream)
    return logits


@pytest.mark.parametrize("case", HEADS)
def test_logits_of_heads_equal_transformers(case: str) -> None:
    made, ids = pair(case), text(60, rows=2)
    expected, got = made.logits(ids), logits_of(made.ours, ids)
    assert len(got) == len(expected) == len(made.ours.heads) == made.case.heads
    for depth, (theirs, ours) in enumerate(zip(expected, got), start=1):
        assert theirs.std() > 0.1, "logits too even to tell a right head from a wrong one"
        torch.testing.assert_close(ours[:, depth:], theirs, atol=BOUND, rtol=BOUND)
