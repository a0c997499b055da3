"""Gradients through a state: right across steps, or refused where they would be wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate import kv
from lmstate.models.fingerprint import weights_in
from tests.zoo import ours, text

POLICIES = {
    "8 bits": kv.Quantized(8),
    "4 bits": kv.Quantized(4),
    "recent": kv.Recent(budget=8, sinks=1),
    "h2o": kv.H2O(budget=8, recent=2, sinks=1),
    "h2o in 8 bits": kv.H2O(budget=8, recent=2, sinks=1, storage=kv.Quantized(8)),
    "snapkv": kv.SnapKV(budget=8, window=2, sinks=1),
}


def trainable(case: str) -> tuple[lmstate.Model, list[Tensor]]:
    model = copy.deepcopy(ours(case))
    leaves = {
        id(x): x
        for _, part in weights_in(model.network)
        for x in (part.tensors().values() if isinstance(part, lmstate.ops.Weight) else [part])
        if x.is_floating_point()
    }
    return model, [x.requires_grad_() for x in leaves.values()]


def gradients(leaves: list[Tensor], loss: Tensor) -> list[Tensor]:
    return [x for x in torch.autograd.grad(loss, leaves, allow_unused=True) if x is not None]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3", "qwen3_next", "mamba2"])
def test_gradients_of_a_stream_in_chunks_equal_those_of_the_whole(case: str, rows: int) -> None:
    model, leaves = trainable(case)
    ids = text(20, rows=rows)
    whole = gradients(leaves, model(ids).square().mean())
    state, pieces = model.new_state(rows), []
    for piece in ids.split([7, 1, 9, 3], dim=1):
        pieces.append(model(piece, state, logits="all"))
        with torch.no_grad():  # a look at what comes, which writes where the next chunk will
            model([[1, 2]] * rows, state, commit=False)
            state.discard()
    got = gradients(leaves, torch.cat(pieces, dim=1).square().mean())
    assert len(got) == len(whole)
    for mine, want in zip(got, whole):
        torch.testing.assert_close(mine, want, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("how", ["state", "snapshot", "tree"])
@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3", "qwen3_next", "mamba2"])
def test_gradients_go_through_a_copy(case: str, how: str) -> None:
    model, leaves = trainable(case)
    ids = text(20)

    def followed(logits: Tensor) -> tuple[Tensor, ...]:  # zeros of experts that only the other row chose
        return torch.autograd.grad(logits.square().mean(), leaves, allow_unused=True, materialize_grads=True)

    state = model.new_state(2)
    pieces = [model([ids[0, :11].tolist(), [3]], state, logits="all")[:1]]
    if how == "state":
        with torch.no_grad():
            twin = copy.deepcopy(state)
        model([[4], [5]], state)  # which is no part of the copy
        state = twin
    elif how == "snapshot":
        state.restore(1, copy.deepcopy(state.snapshot(0)))
        state.select([1, 0])
    else:
        out = model([[5, *ids[0, 11:14].tolist()], []], state, parents=[[-1, -1, 1, 2], []], commit=False)
        pieces.append(out[:1, 1:])
        state.commit_path([[1, 2, 3], []])
    at = state.lengths[0]
    pieces.append(model([ids[0, at:].tolist(), []], state, logits="all")[:1])
    for mine, want in zip(followed(torch.cat(pieces, dim=1)), followed(model(ids))):
        torch.testing.assert_close(mine, want, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["llama", "deepseek_v3"])
def test_gradients_that_a_policy_loses_are_refused(case: str, policy: str) -> None:
    model, leaves = trainable(case)
    ids, state = text(24), model.new_state(kv=POLICIES[policy])
    first = model(ids[:, :14], state, logits="all")
    second = model(ids[:, 14:], state, logits="all")
    with pytest.raises(lmstate.UnsupportedError, match="gradient"):
        gradients(leaves, first.sum() + second.sum())


@pytest.mark.parametrize("policy", ["recent", "h2o", "snapkv"])
def test_the_gradient_of_one_step_outlives_the_evictions_that_follow(policy: str) -> None:
    model, leaves = trainable("llama")
    ids = text(14)
    whole = gradients(leaves, model(ids).square().mean())
    state = model.new_state(kv=POLICIES[policy])
    loss = model(ids, state, logits="all").square().mean()
    with torch.no_grad():
        for token in range(5):
            model([[token]], state)
    for mine, want in zip(gradients(leaves, loss), whole):
        torch.testing.assert_close(mine, want, atol=1e-5, rtol=1e-3)
