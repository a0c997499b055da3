"""The loss under a policy that evicts is that of a state that does; its gradients are those with evictions constant."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lmstate.errors import StateError, UnsupportedError
from lmstate.kv import H2O, Dense, ExpectedAttention, PerLayer, Quantized, Recent, SnapKV
from lmstate.state.layers.base import Policy
from lmstate.training import TrainableModel, loss
from tests.training.in_double import InDouble
from tests.training.small import furthest, gradients, opened, ragged, saved, theirs, trainable

ROWS, CHUNK = (40, 23, 5), 8
RECENT, H2OS = Recent(budget=9, sinks=2), H2O(budget=9, recent=4, sinks=1)
CASES: list[tuple[str, Policy | PerLayer]] = [
    ("llama", RECENT),
    ("llama", H2OS),
    ("llama", SnapKV(budget=12, window=3, sinks=1)),
    ("llama", ExpectedAttention(budget=12, sinks=1, recent=2, window=4)),
    ("llama", PerLayer({1: H2OS})),
    ("gpt_oss", H2OS),  # sinks, and windows beside full attention
    ("gemma3n", H2OS),  # layers that read what others store
    ("deepseek_v3", H2OS),
    ("falcon_h1", RECENT),
]


def of_a_state(model: TrainableModel, rows: list[list[int]], kv: Policy | PerLayer) -> float:
    """The mean cross entropy from a state with the policy that is fed the same chunks."""
    with torch.no_grad():
        state, total = model.new_state(rows=len(rows), rewind=0, kv=kv), 0.0
        for first in range(0, max(map(len, rows)), CHUNK):
            part = [row[first : first + CHUNK] for row in rows]
            logits = model(part, state, logits="all")
            assert logits is not None
            for row, ids, own in zip(rows, part, logits):
                wanted = row[first + 1 : first + 1 + len(ids)]
                targets = torch.tensor(wanted, dtype=torch.long)
                total += float(F.cross_entropy(own[: len(wanted)], targets, reduction="sum"))
    return total / sum(len(row) - 1 for row in rows)


@pytest.mark.parametrize(("case", "kv"), CASES)
def test_the_loss_is_that_of_a_state_that_evicts(case: str, kv: Policy | PerLayer) -> None:
    model, rows = trainable(case), ragged(*ROWS)
    value = loss(model, rows, chunk=CHUNK, kv=kv)
    assert float(value.detach()) == pytest.approx(of_a_state(model, rows, kv), abs=1e-5)
    assert abs(float(value.detach()) - float(loss(model, rows, chunk=CHUNK).detach())) > 1e-5, "nothing was evicted"


@pytest.mark.parametrize(("case", "kv"), CASES)
def test_gradients_are_those_with_evictions_constant(case: str, kv: Policy | PerLayer) -> None:
    """Against differences of the loss in float64, so small that no eviction changes."""
    with saved(theirs(case)) as folder, InDouble():
        model, rows = opened(folder), ragged(*ROWS)
        loss(model, rows, chunk=CHUNK, kv=kv).backward()
        torch.manual_seed(1)
        step = 1e-7
        leaves = [leaf for leaf in model.parameters() if leaf.grad is not None]
        ways = [torch.randn_like(leaf) for leaf in leaves]
        expected = sum(float((leaf.grad * way).sum()) for leaf, way in zip(leaves, ways))  # type: ignore[operator]
        ends = []
        for sign in (step, -2 * step):
            with torch.no_grad():
                for leaf, way in zip(leaves, ways):
                    leaf += sign * way
                ends.append(float(loss(model, rows, chunk=CHUNK, kv=kv)))
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_a_budget_for_the_whole_text_changes_nothing() -> None:
    model, rows = trainable("llama"), ragged(*ROWS)
    loss(model, rows, chunk=CHUNK).backward()
    wanted = {name: None if grad is None else grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    loss(model, rows, chunk=CHUNK, kv=Recent(budget=max(ROWS))).backward()
    assert furthest(gradients(model), wanted, floor=1e-5)[0] < 1e-5


@pytest.mark.parametrize(("case", "kv"), CASES[1::4])
def test_layers_that_are_computed_once_more_find_the_same(case: str, kv: Policy | PerLayer) -> None:
    model, rows = trainable(case), ragged(*ROWS)
    found = []
    for checkpoint in (False, True):
        model.zero_grad()
        loss(model, rows, chunk=CHUNK, kv=kv, checkpoint=checkpoint).backward()
        found.append({name: None if grad is None else grad.clone() for name, grad in gradients(model).items()})
    assert furthest(found[1], found[0], floor=1e-5)[0] < 1e-5


def test_policies_that_round_are_refused() -> None:
    model = trainable("llama")
    for kv in (Quantized(8), Recent(budget=9, storage=Quantized(4)), Dense(torch.bfloat16)):
        with pytest.raises(UnsupportedError, match="rounds"):
            loss(model, [[1, 2, 3]], kv=kv)
    with pytest.raises(StateError):
        loss(model, [[1, 2, 3]], kv="recent")  # type: ignore[arg-type]
    assert all(leaf.grad is None for leaf in model.parameters())
