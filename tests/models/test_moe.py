"""Mixtures of experts: grouped execution equals one token at a time, and the router's options mean what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmstate.errors import ModelError
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.ops import FloatWeight, dispatch

WIDTH, EXPERTS = 12, 8


def weight(*shape: int, seed: int) -> FloatWeight:
    return FloatWeight(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def tokens(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(99))


EACH = [MLP(weight(2 * 5, WIDTH, seed=2 * i), weight(WIDTH, 5, seed=2 * i + 1)) for i in range(EXPERTS)]
GATE = weight(EXPERTS, WIDTH, seed=50)
ROUTERS = {
    "softmax": Router(GATE, 3),
    "normalized": Router(GATE, 3, normalize=True),
    "sigmoid": Router(
        GATE, 2, "sigmoid", normalize=True, scale=2.5, e_score_correction_bias=torch.linspace(-1, 1, EXPERTS)
    ),
    "groups": Router(GATE, 3, "sigmoid", groups=4, topk_groups=2, group_score="top2"),
    "zeros": Router(
        GATE, 3, "sigmoid", e_score_correction_bias=torch.linspace(-0.8, 0.2, EXPERTS), groups=4, topk_groups=2,
        group_score="top2", left_out=0.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("scale_input", [False, True])
def test_grouped_equals_one_token_and_expert_at_a_time(name: str, scale_input: bool) -> None:
    x = tokens(20)
    shared, gate = MLP(weight(2 * 5, WIDTH, seed=70), weight(WIDTH, 5, seed=71)), weight(1, WIDTH, seed=72)
    block = MixtureOfExperts(ROUTERS[name], EACH, shared, gate, scale_input)
    weights, chosen = ROUTERS[name](x)
    for index, got in enumerate(block(x[None])[0]):
        token = x[index : index + 1]
        expected = shared(token) * (token @ gate.matrix.T).sigmoid()
        for w, expert in zip(weights[index], chosen[index].tolist()):
            expected = expected + (EACH[expert](token * w) if scale_input else EACH[expert](token) * w)
        torch.testing.assert_close(got, expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_token_does_not_see_the_others(name: str) -> None:
    x, block = tokens(9), MixtureOfExperts(ROUTERS[name], EACH)
    alone = torch.cat([block(token[None, None]) for token in x], dim=1)
    exact = dispatch.choice().library is not None  # what the native bodies promise, and torch's products do not
    torch.testing.assert_close(block(x[None]), alone, atol=0 if exact else 1e-5, rtol=0 if exact else 1e-5)


def test_normalized_softmax_is_a_softmax_over_the_chosen() -> None:
    x = tokens(5)
    weights, chosen = ROUTERS["normalized"](x)
    logits = (x @ GATE.matrix.T).gather(-1, chosen)
    torch.testing.assert_close(weights, logits.softmax(-1))


def test_correction_moves_the_choice_and_not_the_weights() -> None:
    x, pushed = tokens(30), torch.zeros(EXPERTS)
    pushed[3] = 10.0
    weights, chosen = Router(GATE, 2, "sigmoid", e_score_correction_bias=pushed)(x)
    assert bool((chosen == 3).any(-1).all())
    torch.testing.assert_close(weights, (x @ GATE.matrix.T).sigmoid().gather(-1, chosen))


def test_only_experts_of_the_kept_groups_are_chosen() -> None:
    x = tokens(50)
    _, chosen = ROUTERS["groups"](x)
    groups = chosen // 2  # two experts in each of four groups
    assert max(len(set(row)) for row in groups.tolist()) == 2
    _, free = Router(GATE, 3, "sigmoid")(x)
    assert max(len(set(row)) for row in (free // 2).tolist()) == 3, "groups would have made no difference"


def test_an_expert_that_is_left_out_by_a_zero_comes_before_a_negative_score() -> None:
    router = replace(ROUTERS["zeros"], e_score_correction_bias=torch.full((EXPERTS,), -2.0))
    within = replace(router, left_out=float("-inf"))
    for token in tokens(20):
        best, others = (set(each(token[None])[1][0].tolist()) for each in (within, router))
        assert {index // 2 for index in best}.isdisjoint(index // 2 for index in others)


@pytest.mark.parametrize(
    ("top_k", "groups", "kept", "score"),
    [(3, 3, 1, "top1"), (3, 4, 1, "top1"), (2, 4, 5, "top1"), (2, 8, 4, "top2"), (9, 1, 1, "top1")],
)
def test_groups_that_cannot_be_are_refused(top_k: int, groups: int, kept: int, score: Any) -> None:
    with pytest.raises(ModelError, match="8 experts cannot"):
        Router(GATE, top_k, groups=groups, topk_groups=kept, group_score=score)
