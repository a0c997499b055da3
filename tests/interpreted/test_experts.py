"""Experts whose routes are grouped on the device, gates in the epilogue of a product, and the largest of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmstate import ops
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.ops.cuda import dense
from lmstate.ops.cuda.experts import ExpertTable, choose_experts, experts
from lmstate.ops.types.sublayers import Expert
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.grouped import FloatWeight, quantize


def weight(kind: str, outputs: int, inputs: int) -> Weight:
    matrix = torch.randn(outputs, inputs) * inputs**-0.5
    return quantize(matrix, kind) if kind.startswith("int") else FloatWeight(matrix.to(getattr(torch, kind)))


def some(kind: str, count: int, act: str, biased: bool) -> tuple[Expert, ...]:
    def one() -> Expert:
        biases = (torch.randn(2 * 64), torch.randn(96)) if biased else (None, None)
        return Expert(weight(kind, 2 * 64, 96), weight(kind, 96, 64), act, *biases)

    return tuple(one() for _ in range(count))


@pytest.mark.parametrize(
    ("kind", "act", "biased", "scale_input"),
    [("float32", "silu", False, False), ("float32", "swigluoai", True, False), ("float32", "silu", False, True),
     ("bfloat16", "gelu_tanh", False, False), ("int4", "silu", True, False), ("int8", "silu", False, False)],
)  # fmt: skip
def test_experts_give_what_one_after_the_other_gives(kind: str, act: str, biased: bool, scale_input: bool) -> None:
    own = some(kind, 6, act, biased)
    x = torch.randn(21, 96)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(21)])  # the last expert gets no token
    weights = torch.rand(21, 2)
    y = experts(x, weights, chosen, ExpertTable(own), scale_input)
    layer = MixtureOfExperts(lambda x: (weights, chosen), [MLP(*each[:3], True, *each[3:]) for each in own],
                             scale_input=scale_input)  # fmt: skip
    expected = layer.routed(x, weights, chosen)
    rounds = kind != "float32"
    torch.testing.assert_close(y, expected, rtol=0, atol=4e-2 if rounds else 2e-5)
    for first, last in ((0, 1), (3, 11), (20, 21)):
        part = experts(x[first:last], weights[first:last], chosen[first:last], ExpertTable(own), scale_input)
        assert torch.equal(part, y[first:last]), "a token's experts do not depend on its neighbors"


def test_tiles_of_many_tokens_change_no_bit() -> None:
    own, x = some("bfloat16", 2, "silu", False), torch.randn(150, 96)
    chosen = (torch.arange(150) % 7 == 0).long()[:, None]
    weights = torch.rand(150, 1)
    y = experts(x, weights, chosen, ExpertTable(own), False)  # in tiles of 64 routes, alone in tiles of 16
    assert torch.equal(y[147:], experts(x[147:], weights[147:], chosen[147:], ExpertTable(own), False))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("count", "groups", "kept", "score", "corrected"),
    [(8, 1, 1, "top1", False), (60, 1, 1, "top1", True), (24, 4, 2, "top2", True), (32, 8, 3, "top1", False)],
)
def test_the_choice_of_experts(scoring: Any, count: int, groups: int, kept: int, score: Any, corrected: bool) -> None:
    correction = torch.randn(count) / 5 if corrected else None
    router = Router(weight("float32", count, 16), 4, scoring, normalize=corrected, scale=1.5, groups=groups,
                    topk_groups=kept, group_score=score, e_score_correction_bias=correction)  # fmt: skip
    logits = torch.randn(40, count)
    logits[3] = 0.5  # the first of equals
    weights, chosen = choose_experts(logits, router.params)
    expected = ops.choose_experts(logits, router.params)  # of the processor, which breaks ties alike
    assert expected is not None
    assert torch.equal(chosen, expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=1e-6, atol=0)
    for at in (0, 3, 39):
        alone = choose_experts(logits[at : at + 1], router.params)
        assert torch.equal(alone[0][0], weights[at]) and torch.equal(alone[1][0], chosen[at])


def test_a_choice_among_nan_stays_among_the_experts() -> None:
    router = Router(weight("float32", 6, 16), 2, "softmax", normalize=True)
    weights, chosen = choose_experts(torch.full((1, 6), torch.nan), router.params)
    assert weights.isnan().all() and int(chosen.min()) >= 0 and int(chosen.max()) < 6


def test_a_change_in_place_is_seen() -> None:
    own, x = some("bfloat16", 2, "silu", True), torch.randn(5, 96)
    table, weights, chosen = ExpertTable(own), torch.rand(5, 1), torch.ones(5, 1, dtype=torch.int64)
    before = experts(x, weights, chosen, table, False)
    own[1].up.storage.mul_(0.5)
    own[1].down_bias.add_(1.0)
    after = experts(x, weights, chosen, table, False)
    assert torch.equal(after, experts(x, weights, chosen, ExpertTable(own), False))
    assert not torch.equal(after, before)


def test_experts_of_several_shapes_or_kinds_have_no_table() -> None:
    own = some("float32", 2, "silu", False)
    assert ExpertTable.fits(own)
    assert not ExpertTable.fits((*own, *some("bfloat16", 1, "silu", False)))
    assert not ExpertTable.fits(tuple(each._replace(act="tanh") for each in own))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4", "int8"])
@pytest.mark.parametrize("act", ["silu", "swigluoai"])
def test_a_gate_in_the_epilogue_changes_no_bit(kind: str, act: str) -> None:
    up, bias, x = weight(kind, 2 * 83, 160), torch.randn(2 * 83), torch.randn(70, 160)
    whole = dense.linear_glu(x, up, bias, act)
    assert torch.equal(whole, dense.glu(dense.linear(x, up, bias, None), act))
    assert torch.equal(dense.linear_glu(x[5:6], up, bias, act), whole[5:6])


def test_the_largest_number_and_its_first_place() -> None:
    x = torch.randn(5, 9000)
    x[0, [17, 5000, 8999]] = 9.0
    x[1, [8191, 4096]] = torch.nan
    x[2] = -torch.inf
    x[3, 8999] = torch.inf
    top, place = dense.argmax(x)
    expected, where = x.max(-1)
    torch.testing.assert_close(top, expected, rtol=0, atol=0, equal_nan=True)
    assert place.tolist() == [17, 4096, 0, 8999, int(where[4])]
