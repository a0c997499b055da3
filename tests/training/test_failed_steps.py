"""A step with gradients that fails leaves nothing behind: no graph, and no bit of what the state holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lmstate import kv
from tests.training.small import trainable
from tests.zoo import text

# Keys in full and in a window, latents, and every kind of recurrence.
CASES = ("llama-tied-mha", "gemma2", "deepseek_v3", "falcon_h1", "lfm2")
POLICIES = {"dense": None, "int4": kv.Quantized(4), "recent": kv.Recent(budget=24)}


class Saved:
    """A tensor that a graph keeps for its backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # a graph that held its own results would never end


@contextmanager
def counted() -> Iterator[weakref.WeakSet[Saved]]:
    """The tensors that graphs of this block keep, as long as they keep them."""
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Saved:
        alive.add(saved := Saved(tensor))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        yield alive


class Failure(Exception):
    pass


def fail_in_the_second_part(done: int, total: int) -> None:
    if done:
        raise Failure


@pytest.mark.parametrize("follows", [False, True], ids=["constant past", "past with gradients"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_a_failed_step_keeps_no_graph(case: str, policy: str, follows: bool) -> None:
    model, ids = trainable(case), text(60, seed=3)[0].tolist()
    state = model.new_state(kv=POLICIES[policy])
    state.layout = type(state.layout)(**{**vars(state.layout), "chunk": 16})
    with counted() as alive:
        with torch.set_grad_enabled(follows):
            model([ids[:20]], state)
        model([ids], model.new_state())  # each call makes the model's network anew, and a part of that is a graph
        gc.collect()
        before = len(alive)
        model.on_part = fail_in_the_second_part
        with pytest.raises(Failure):
            model([ids[20:]], state)
        model.on_part = None
        gc.collect()
        assert len(alive) == before
    assert state.lengths == [20]
    fresh = model.new_state(kv=POLICIES[policy])
    fresh.layout = state.layout
    with torch.set_grad_enabled(follows):
        model([ids[:20]], fresh)
    with torch.no_grad():
        assert torch.equal(model([ids[20:]], state), model([ids[20:]], fresh))


@pytest.mark.parametrize("case", CASES)
def test_gradients_after_a_failed_step_are_as_if_it_had_not_been(case: str) -> None:
    model, ids = trainable(case), text(60, seed=3)[0].tolist()
    grads = []
    for fails in (False, True):
        state = model.new_state()
        state.layout = type(state.layout)(**{**vars(state.layout), "chunk": 16})
        first = model([ids[:20]], state, logits="all")
        if fails:
            model.on_part = fail_in_the_second_part
            with pytest.raises(Failure):
                model([ids[10:50]], state)
            model.on_part = None
        loss = first.square().mean() + model([ids[20:40]], state, logits="all").square().mean()
        loss.backward()
        grads.append([None if leaf.grad is None else leaf.grad.clone() for leaf in model.parameters()])
        for leaf in model.parameters():
            leaf.grad = None
    for want, got in zip(*grads, strict=True):
        assert (want is None) == (got is None)
        assert want is None or got is None or torch.equal(want, got)
