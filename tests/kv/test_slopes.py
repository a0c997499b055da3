"""Policies of models whose scores fall with the distance (ALiBi): slots are no positions once something was evicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lmstate import kv
from lmstate.models.layers.attention import Attention
from lmstate.models.model import Model
from tests.zoo import ours, text

LENGTH, BUDGET = 90, 24


def windowed(model: Model, window: int) -> Model:
    """The model, with a sliding window in each layer."""
    blocks = []
    for block in model.blocks:
        assert isinstance(block.mixer, Attention) and block.mixer.slopes is not None
        blocks.append(replace(block, mixer=replace(block.mixer, window=window)))
    return replace(model, network=replace(model.network, blocks=tuple(blocks)))


def one_by_one(model: Model, ids: torch.Tensor, policy: object) -> torch.Tensor:
    state = model.new_state(len(ids), kv=policy)
    return torch.cat([model(ids[:, i : i + 1], state, logits="all") for i in range(ids.shape[1])], 1)


@pytest.mark.parametrize("case", ["bloom", "mpt"])
def test_the_last_tokens_alone_are_a_window(case: str) -> None:
    ids = text(LENGTH, rows=2)
    model = ours(case)
    expected = windowed(model, BUDGET + 1)(ids)  # a token sees itself too
    torch.testing.assert_close(one_by_one(model, ids, kv.Recent(BUDGET, sinks=0)), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model(ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "policy", [kv.H2O(LENGTH, recent=8), kv.SnapKV(LENGTH, window=8), kv.Quantized(8), kv.Quantized(4)], ids=repr
)
def test_a_policy_that_evicts_nothing_changes_little(policy: object) -> None:
    ids = text(LENGTH)
    model = ours("bloom")
    bound = 1e-4 if isinstance(policy, kv.H2O | kv.SnapKV) else 0.05 if policy == kv.Quantized(8) else 0.8
    torch.testing.assert_close(one_by_one(model, ids, policy), model(ids), atol=bound, rtol=bound)
