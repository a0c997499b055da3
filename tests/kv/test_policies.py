"""Policies by layer, long streams, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lmstate
from lmstate import kv
from lmstate.state.kv.eviction.attention import EvictingState
from tests.invariants.mirror import bytes_held
from tests.kv.policies import BUDGETS
from tests.kv.watch import attention_of
from tests.zoo import ours, text


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


@pytest.mark.parametrize(
    ("policy", "length"), [(kv.Recent(budget=1024), 50_000), (kv.H2O(budget=1024, recent=64), 12_000)]
)
def test_a_long_stream_through_a_budget(policy: kv.Budget, length: int) -> None:
    """Memory stays what it was after the first thousand; positions go on, no slot is lost."""
    model = ours("llama")
    state = model.new_state(kv=policy)
    stream = ids(length)
    held = []
    for first in range(0, length, 2000):
        model([stream[first : first + 1990]], state, logits="none")
        for token in stream[first + 1990 : first + 2000]:
            model([[token]], state, logits="none")
        held.append(sum(state.memory().values()))
        assert all(len(head) == 1024 for head in state.kept(0, 1))
    assert max(held[1:]) <= held[1] * 1.02
    layer = attention_of(state.layers[1])
    assert isinstance(layer, EvictingState) and layer.slots <= 1024 + 512 + 16 + 32
    assert state.lengths == [length] and state.kept(0, 0)[0][-1] == length - 1
    assert sum(state.memory().values()) == bytes_held(state)


@pytest.mark.parametrize("policy", BUDGETS)
def test_slots_are_given_back(policy: str) -> None:
    """After a long prompt the state holds what its budget says, and not the prompt."""
    model = ours("llama")
    budget = BUDGETS[policy]
    short, long = (model.new_state(kv=budget, rewind=4) for _ in range(2))
    for token in ids(60):
        model([[token]], short)
    model([ids(600)], long)
    for token in ids(10):
        model([[token]], long)
    extra = 1.6  # what is grown by doubling and given back when it is more than an eighth too much
    assert sum(long.memory().values()) <= extra * sum(short.memory().values())


def test_a_policy_for_each_layer() -> None:
    model = ours("llama")
    by_layer = kv.PerLayer({0: kv.Recent(budget=8, sinks=1)}, default=kv.Quantized(8))
    for given in (by_layer, lambda layer: kv.Recent(budget=8, sinks=1) if layer == 0 else kv.Quantized(8)):
        state = model.new_state(kv=given)
        model([ids(30)], state)
        assert state.kept(0, 0) == [[0, *range(23, 30)]] * len(state.kept(0, 0))
        assert state.kept(0, 1)[0] == list(range(30))
        assert any(tensor.dtype == torch.int8 for tensor in state.layers[1].tensors())


def test_pyramid_budgets_fall_and_add_up() -> None:
    pyramid = kv.pyramid(kv.H2O(budget=100, recent=8), layers=10, ratio=4)
    budgets = [pyramid(layer).budget for layer in range(10)]
    assert budgets == sorted(budgets, reverse=True)
    assert abs(sum(budgets) - 1000) <= 10 and abs(budgets[0] / budgets[-1] - 4) < 0.1


def test_dense_takes_a_dtype() -> None:
    model = ours("llama")
    dense, half = model.new_state(), model.new_state(kv=kv.Dense(torch.bfloat16))
    for state in (dense, half):
        model([ids(30)], state)
    assert half.memory()["attention"] * 2 == dense.memory()["attention"]
    plain = model.new_state(kv=torch.bfloat16)
    model([ids(30)], plain)
    assert plain.memory() == half.memory()


def test_windows_shorter_than_the_budget_are_left_alone() -> None:
    model = ours("mistral")
    state = model.new_state(kv=kv.Recent(budget=64, storage=kv.Quantized(8)))
    model([ids(90)], state)
    assert not isinstance(attention_of(state.layers[0]), EvictingState)
    assert state.kept(0, 0)[0] == list(range(90 - 17 + 1, 90))
    assert any(tensor.dtype == torch.int8 for tensor in state.layers[0].tensors())


@pytest.mark.parametrize("given", [8, "int8", lambda layer: None, kv.PerLayer({0: "h2o"}), kv.Dense, kv.H2O])
def test_what_is_no_policy_is_refused(given: object) -> None:
    with pytest.raises(lmstate.StateError, match=r"policy of lmstate\.kv"):
        ours("llama").new_state(kv=given)


@pytest.mark.parametrize("layer", [99, 3, -1, "0"])
def test_a_policy_for_a_layer_that_there_is_not_is_refused(layer: object) -> None:
    model = ours("llama")
    assert len(model.blocks) == 3
    given = kv.PerLayer({0: kv.Recent(budget=8, sinks=1), layer: kv.Quantized(8)})  # type: ignore[dict-item]
    with pytest.raises(lmstate.StateError, match=rf"layer {layer!r}; the model has the layers 0 to 2"):
        model.new_state(kv=given)


@pytest.mark.parametrize("make", [
    lambda: kv.Recent(budget=0), lambda: kv.Recent(budget=4, sinks=5), lambda: kv.H2O(budget=100, recent=100),
    lambda: kv.SnapKV(budget=32, window=32), lambda: kv.Recent(budget=4, sinks=-1),
])  # fmt: skip
def test_budgets_that_hold_nothing_are_refused(make: object) -> None:
    with pytest.raises(lmstate.StateError, match="budget"):
        make()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: kv.Recent(budget=32, storage="int8"), r"storage='int8'.*kv\.Quantized"),
    (lambda: kv.Recent(budget=32, storage=kv.Quantized), "storage=<class"),
    (lambda: kv.H2O(budget=64, recent=8, storage=kv.Recent()), r"storage=Recent\("),
    (lambda: kv.H2O(budget="64"), "budget of H2O must be a whole number"),
    (lambda: kv.Recent(budget=32.5), "budget of Recent must be a whole number"),
    (lambda: kv.Quantized("8"), "bits of Quantized must be a whole number; '8'"),
    (lambda: kv.Dense("bfloat16"), r"dtype='bfloat16'.*torch\.bfloat16"),
    (lambda: kv.Dense(torch.int8), r"dtype=torch\.int8.*Quantized"),
    (lambda: kv.Dense(torch.float8_e4m3fn), "float8"),
    (lambda: kv.pyramid(kv.Dense(), 4), "policy with a budget"),
])  # fmt: skip
def test_a_policy_of_wrong_values_is_refused_where_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(lmstate.StateError, match=message):
        make()


def test_kept_of_a_recurrence_is_refused() -> None:
    state = ours("qwen3_next").new_state()
    with pytest.raises(lmstate.UnsupportedError):
        state.kept(0, 0)
    assert state.kept(0, 3) == [[], []]
    with pytest.raises(lmstate.StateError):
        state.kept(0, 99)
