"""A mixture of experts as a half of a run gives what its operations give one after the other."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lmstate.ops as ops
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.ops import Norm, Residual
from tests.ops.helpers import stored

EMBED, HIDDEN, EXPERTS = 96, 64, 12


def expert(kind: str, hidden: int = HIDDEN, act: str = "silu", biased: bool = False) -> MLP:
    biases = (torch.randn(2 * hidden), torch.randn(EMBED)) if biased else (None, None)
    up, down = torch.randn(2 * hidden, EMBED) / 8, torch.randn(EMBED, hidden) / 8
    return MLP(stored(up, kind), stored(down, kind), act, up_bias=biases[0], down_bias=biases[1])


def mixture(kinds: str | list[str], top_k: int, shared: MLP | None = None, **options: Any) -> MixtureOfExperts:
    own = {name: options.pop(name) for name in ("act", "biased") if name in options}
    rest = {name: options.pop(name) for name in ("shared_gate", "scale_input") if name in options}
    kinds = [kinds] * EXPERTS if isinstance(kinds, str) else kinds
    router = Router(ops.FloatWeight(torch.randn(EXPERTS, EMBED)), top_k, **options)
    return MixtureOfExperts(router, [expert(kind, **own) for kind in kinds], shared, **rest)


CASES = {
    "softmax": lambda: mixture("int4", 3),
    "normalized, a shared one": lambda: mixture("int8", 4, expert("int8", 160), normalize=True),
    "a shared one with a gate": lambda: mixture(
        "bfloat16", 2, expert("bfloat16", 32), shared_gate=ops.FloatWeight(torch.randn(1, EMBED)), normalize=True
    ),
    "sigmoid, corrected, scaled, in groups": lambda: mixture(
        "float32", 3, scoring="sigmoid", normalize=True, scale=2.5, e_score_correction_bias=torch.randn(EXPERTS),
        groups=4, topk_groups=2, group_score="top2",
    ),
    "groups by their best": lambda: mixture("int4", 2, groups=3, topk_groups=2, scale=16.0),
    "inputs weighed": lambda: mixture("int8", 1, expert("int4"), scoring="sigmoid", scale_input=True),
    "biases, another gate": lambda: mixture("int4", 2, act="relu2", biased=True, bias=torch.randn(EXPERTS)),
    "the gate of gpt-oss": lambda: mixture("bfloat16", 2, act="swigluoai", biased=True, normalize=True),
    "activations of 8 bits": lambda: mixture("int4/8", 3, expert("int8/8"), normalize=True),
    "several kinds": lambda: mixture(["int4", "int8/8", "bfloat16"] * 4, EXPERTS),
}  # fmt: skip
COUNTS = {"a token": [1], "rows": [1, 1, 1], "ragged": [5, 0, 9], "most": [32]}


def norm_of(seed: int) -> Norm:
    return Norm(torch.rand(EMBED, generator=torch.Generator().manual_seed(seed)) + 0.5, 1e-5)


def waited(block: MixtureOfExperts, x: Tensor, counts: Tensor, norm: Norm | None, joined: Residual) -> Tensor:
    graph = ops.FusedGraph(x, counts * 0, counts)
    graph.set_residual(joined.stream, x)
    (sublayer,) = block.sublayers(norm, joined.norm, joined.scale, False)
    fusable = graph.fusable(sublayer)
    assert fusable is not None
    graph.add(fusable)
    return graph.flush()


@pytest.mark.parametrize("after", [None, norm_of(2)], ids=["", "a norm after it"])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("name", CASES)
def test_a_half_equals_its_operations(variant: str, name: str, counts: str, after: Norm | None) -> None:
    torch.manual_seed(1)
    block, each = CASES[name](), COUNTS[counts]
    x, stream = torch.randn(2, len(each), max(each), EMBED)
    joined = Residual(stream, after, 0.3 if after else 1.0)
    got = waited(block, x, torch.tensor(each), norm_of(3), joined)
    want = block(x, norm_of(3), joined)
    for row, count in enumerate(each):
        torch.testing.assert_close(got[row, :count], want[row, :count], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_token_is_the_same_whatever_is_beside_it(variant: str, name: str) -> None:
    torch.manual_seed(2)
    block, x, one = CASES[name](), torch.randn(3, 4, EMBED), torch.tensor([1])
    together = waited(block, x, torch.tensor([4, 4, 4]), None, Residual(x))
    for token, got in zip(x.flatten(0, 1), together.flatten(0, 1)):
        token = token[None, None]
        assert torch.equal(waited(block, token, one, None, Residual(token))[0, 0], got)


def test_padding_visits_no_expert(variant: str) -> None:
    torch.manual_seed(3)
    block, x = CASES["softmax"](), torch.randn(2, 3, EMBED)
    want = waited(block, x, torch.tensor([3, 1]), None, Residual(x))
    x[1, 1:] = torch.nan
    got = waited(block, x, torch.tensor([3, 1]), None, Residual(x))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1, 0], want[1, 0])


def test_a_nan_stays_with_its_token(variant: str) -> None:
    torch.manual_seed(4)
    block, x = CASES["sigmoid, corrected, scaled, in groups"](), torch.randn(1, 3, EMBED)
    want, counts = waited(block, x, torch.tensor([3]), None, Residual(x)), torch.tensor([3])
    x[0, 1] = torch.nan
    got = waited(block, x, counts, None, Residual(x))
    assert got[0, 1].isnan().all() and torch.equal(got[0, ::2], want[0, ::2])


def test_an_expert_that_was_replaced_is_read(variant: str) -> None:
    torch.manual_seed(5)
    block, x, one = CASES["sigmoid, corrected, scaled, in groups"](), torch.randn(1, 1, EMBED), torch.tensor([1])
    (sublayer,) = block.sublayers(None, None, 1.0, False)

    def mixed() -> Tensor:
        graph = ops.FusedGraph(x, one * 0, one)
        fusable = graph.fusable(sublayer)
        assert fusable is not None
        graph.add(fusable)
        return graph.flush() - x

    before = mixed()
    for each in block.experts:
        assert isinstance(each, MLP)
        each.down.storage = -each.down.storage
    torch.testing.assert_close(mixed(), -before)


def test_a_captured_mixture_keeps_the_table_that_it_points_to(variant: str) -> None:
    """Also where its weights were others meanwhile and are back, as when an adapter is put on and taken off."""
    torch.manual_seed(6)
    block, x, one = CASES["several kinds"](), torch.randn(1, 1, EMBED), torch.tensor([1])
    (sublayer,) = block.sublayers(None, None, 1.0, False)

    def waiting() -> ops.FusedGraph:
        graph = ops.FusedGraph(x, one * 0, one)
        fusable = graph.fusable(sublayer)
        assert fusable is not None
        graph.add(fusable)
        return graph

    graph = waiting()
    captured = graph.capture()
    assert captured is not None
    table, size = weakref.ref(captured.arguments[0].table), captured.arguments[0].table.nbytes
    want, down = graph.flush(), block.experts[0].down
    del graph
    assert isinstance(down, ops.Weight)
    own, down.storage = down.storage, down.storage.clone()
    waiting().flush()  # packed anew
    down.storage = own
    gc.collect()
    garbage = [bytearray(b"\xff" * size) for _ in range(256)]  # which would lie where the table lay
    assert table() is not None
    replayed = ops.FusedGraph(x, one * 0, one)
    assert replayed.replay(captured, [], [], []) == []
    assert torch.equal(replayed.flush(), want) and garbage


def test_what_no_body_knows_does_not_wait(variant: str) -> None:
    block, x, one = CASES["softmax"](), torch.randn(1, 1, EMBED), torch.tensor([1])
    plain = replace(block, experts=[replace(each, gated=False) for each in block.experts])  # type: ignore[type-var]
    assert plain.sublayers(None, None, 1.0, False) == () and block.sublayers(None, None, 1.0, True) == ()
    other = replace(block, experts=[replace(each, act="gelu") for each in block.experts])  # type: ignore[type-var]
    (sublayer,) = other.sublayers(None, None, 1.0, False)
    assert ops.FusedGraph(x, one * 0, one).fusable(sublayer) is None


def test_experts_that_do_not_fit_are_refused(variant: str) -> None:
    block, x, one = CASES["softmax"](), torch.randn(1, 1, EMBED), torch.tensor([1])
    for experts, what in (
        ([*block.experts[:-1], expert("int4", 32)], "of different widths"),
        (block.experts[:-1], "does not fit a choice of 3 of 11"),
    ):
        (sublayer,) = replace(block, experts=experts).sublayers(None, None, 1.0, False)
        with pytest.raises(ValueError, match=what):
            ops.FusedGraph(x, one * 0, one).fusable(sublayer)
