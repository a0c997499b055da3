"""A state's plan runs its steps as the blocks themselves would, and captured segments replay while nothing moved."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lmstate import kv
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.stack import FusedSegment, Part
from lmstate.ops import dispatch
from tests.zoo import ours, text

CASES = [
    "llama",
    "mistral",
    "gemma3",
    "qwen3_5",
    "granitemoehybrid",
    "mamba2",
    "qwen3_moe",
    "gpt_oss-gate",
    "lfm2",
    "lfm3",
    "falcon_h1",
]
native = pytest.mark.skipif(dispatch.choice().library is None, reason="the references fuse nothing")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Part]]:
    """The parts that were fused, or run, one by one."""
    asked: list[Part] = []

    def noted(name: str) -> None:
        one = getattr(Part, name)
        monkeypatch.setattr(Part, name, lambda part, *given: (asked.append(part), one(part, *given))[1])

    noted("fuse")
    noted("run")
    yield asked


def twin(model: Any, state: Any) -> Any:
    """Another state that holds the same."""
    other = model.new_state()
    other.restore(0, state.snapshot())
    return other


POLICIES = {
    "all": None,
    "4 bits": kv.Quantized(4),
    "recent": kv.Recent(budget=12, sinks=2),
    "h2o": kv.H2O(budget=12, recent=4, sinks=1),
    "snapkv": kv.SnapKV(budget=12, window=4, sinks=1),
}


def talk(case: str, policy: kv.Policy | None) -> list[torch.Tensor]:
    """The logits of ragged steps, drafts, growing slots, a rewind and a copied row."""
    model, ids = ours(case), text(60)[0].tolist()
    state = model.new_state(rows=2, kv=policy)
    steps = [[ids[:9], ids[:4]], [[1], [2]], [[3, 4, 5], [6]], [[], [7]], *([[token], [token]] for token in ids[9:])]
    out = [model(step, state) for step in steps]
    out.append(model([[8, 9], [10, 11]], state, commit=False))
    state.commit([1, 2])
    out.append(model([[1], [1]], state))
    state.rewind(0, state.lengths[0] - 3)
    out += [model([[token], [2]], state) for token in (2, 3)]
    state.select([1, 1, 0])
    return out + [model([[token], [3], [4]], state) for token in (2, 3)]


@native
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_repeated_steps_give_the_same_bits(case: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got = talk(case, POLICIES[policy])
    monkeypatch.setattr(FusedSegment, "_replay", lambda *given: False)
    assert all(torch.equal(one, other) for one, other in zip(got, talk(case, POLICIES[policy]), strict=True))


@native
@pytest.mark.parametrize(
    ("case", "policy"),
    [
        *(("llama", policy) for policy in POLICIES),
        ("mistral", "4 bits"),
        *((case, "all") for case in CASES[2:]),
        ("qwen3_5", "h2o"),
    ],
)
def test_the_next_step_asks_no_part(case: str, policy: str, asked: list[Part]) -> None:
    model = ours(case)
    state = model.new_state(kv=POLICIES[policy])
    for token in text(20)[0].tolist():
        model([[token]], state)
    asked.clear()
    model([[1]], state)
    if policy in ("all", "4 bits"):
        model([[2, 3]], state, commit=False)
        state.discard()
    assert not asked


def changed(model: Any) -> Iterator[str]:
    """Change a model in ways that move something."""
    mlp = model.blocks[0].mlp
    for mixer in (block.mixer for block in model.blocks):
        products = [getattr(mixer, name, None) for name in ("qkv", "qkvz", "project", "gates", "out")]
        for weight in filter(None, products):
            weight.storage = weight.storage / 2
            yield "another storage"
    mlp.down.storage.data = -mlp.down.storage
    yield "other memory of the same storage"
    model.blocks[0].mixer_norm.weight.data = model.blocks[0].mixer_norm.weight * 2
    yield "other memory of a norm"
    model.blocks[1] = dataclasses.replace(model.blocks[1], mlp=dataclasses.replace(mlp, act="gelu_tanh"))
    yield "another block"


@native
@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3_5", "granitemoehybrid"])
def test_what_moved_is_seen(case: str) -> None:
    model = copy.deepcopy(ours(case))
    state = model.new_state()
    for token in [*text(7)[0].tolist(), 1]:
        model([[token]], state)
    state.rewind(0, 7)
    before = model([[1]], twin(model, state))
    for what in changed(model):
        want = model([[1]], twin(model, state))  # no step of which came before
        assert torch.equal(model([[1]], state), want) and not torch.equal(want, before), what
        state.rewind(0, 7)
        before = want


@native
def test_an_expert_that_moved_is_seen() -> None:
    model = copy.deepcopy(ours("qwen3_moe"))
    mixture = next(block.mlp for block in model.blocks if isinstance(block.mlp, MixtureOfExperts))
    state = model.new_state()
    for token in [*text(7)[0].tolist(), 1]:
        model([[token]], state)
    state.rewind(0, 7)
    before = model([[1]], twin(model, state))
    for expert in mixture.experts:
        expert.down.storage = expert.down.storage / 2
    want = model([[1]], twin(model, state))
    assert torch.equal(model([[1]], state), want) and not torch.equal(want, before)


@native
def test_a_gradient_is_followed() -> None:
    model = copy.deepcopy(ours("llama"))
    state = model.new_state()
    for token in (1, 2, 3):
        model([[token]], state)
    weight = model.blocks[0].mlp.down.storage.requires_grad_()
    model([[4]], state).sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert not model([[5]], state).requires_grad


@native
@pytest.mark.parametrize("case", ["llama", "qwen3_5", "mamba2"])
def test_a_device_step_between_others(case: str) -> None:
    model, ids = ours(case), text(8)[0].tolist()
    fixed, plain = model.new_state(static=True, capacity=32), model.new_state()
    for place, token in enumerate(ids):
        want = model([[token]], plain)
        if place == 5:
            got = model.decode_step(torch.tensor([[token]]), fixed)
            fixed.commit()
        else:
            got = model([[token]], fixed)
        torch.testing.assert_close(got, want)


@native
def test_what_was_stored_before_it_grew_is_freed() -> None:
    model = ours("llama")
    state = model.new_state()
    for token in (1, 2, 3):
        model([[token]], state)
    old = weakref.ref(state.layers[0].k)
    gc.disable()
    try:
        model([text(300)[0].tolist()], state)
        assert old() is None
    finally:
        gc.enable()
