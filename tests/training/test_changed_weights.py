"""Weights that change between two calls, and graphs that are walked twice: right gradients, or an error."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch

import lmstate
from lmstate.errors import StateError
from lmstate.training import hidden_states, loss, next_token_loss
from tests.training.small import furthest, gradients, ragged, trainable

RECURRENT = ("mamba2", "qwen3_next", "falcon_h1", "jamba", "lfm2", "rwkv")


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", RECURRENT)
def test_a_prefix_that_no_gradient_follows_leaves_those_of_what_comes_after_whole(
    case: str, off: type[AbstractContextManager[None]]
) -> None:
    model, (ids,) = trainable(case), ragged(12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0001)  # as an optimizer does: what is built of them is made again
    found = []
    for without in (off, torch.no_grad):
        with without():
            state = model.new_state()
            model([ids[:8]], state)
        model.zero_grad()
        logits = model([ids[8:]], state, logits="all")
        assert logits is not None
        logits.logsumexp(-1).sum().backward()
        found.append(gradients(model))
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not [name for name in missing if "experts" not in name], "four tokens do not go to all experts"
    worst, name = furthest(found[0], found[1], floor=1e-6)
    assert worst < 1e-4, name


@pytest.mark.parametrize("case", ["llama", "deepseek_v3", "mamba2"])
def test_a_second_backward_gives_the_gradients_of_the_first(case: str) -> None:
    model, ids = trainable(case), ragged(12, 9)
    parameters = list(model.parameters())
    hidden = hidden_states(model, ids, 4)
    weight = torch.randn_like(hidden)
    losses = [(hidden * weight).sum(), loss(model, ids, chunk=4)]
    read = hidden.detach()[0].requires_grad_()
    losses.append(next_token_loss(model, read, torch.arange(12)) * 0.5)
    for value, wanted in zip(losses, (parameters, parameters, [read])):
        first, second = (
            torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True) for _ in range(2)
        )  # fmt: skip
        assert any(one is not None for one in first)
        for one, other in zip(first, second):
            assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("case", ["llama", "gemma3", "mamba2"])
def test_parameters_that_are_given_other_memory_are_used(case: str, tmp_path: Path) -> None:
    model, ids = trainable(case), ragged(12, 9)
    with torch.no_grad():
        vector = torch.nn.utils.parameters_to_vector(model.parameters()) * 1.5
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
        without = model(ids)
    with_gradients = model(ids)
    model.save_pretrained(tmp_path)
    saved = lmstate.load(tmp_path, weights="float32")(ids)
    for got in (without, with_gradients):
        torch.testing.assert_close(got, saved, atol=1e-4, rtol=1e-4)
    value = loss(model, ids, chunk=4)
    value.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_that_change_between_a_loss_and_its_backward_are_refused() -> None:
    model = trainable("llama")
    value = loss(model, ragged(12), chunk=4)
    with torch.no_grad():
        next(model.parameters()).mul_(1.1)
    with pytest.raises(StateError, match="weights have changed since the loss was computed"):
        value.backward()


@pytest.mark.parametrize("case", ["llama", "gemma3", "deepseek_v3", "qwen3_next", "mamba2"])
def test_drafts_that_were_scored_and_discarded_leave_nothing_for_the_next(case: str) -> None:
    model, (ids,) = trainable(case), ragged(14)
    found = []
    for drafts in ([ids[8:11], ids[9:13]], [ids[9:13]]):
        with torch.no_grad():
            state = model.new_state()
            model([ids[:8]], state)
        for draft in drafts:
            model.zero_grad()
            logits = model([draft], state, logits="all", commit=False)
            assert logits is not None
            state.discard()
            logits.logsumexp(-1).sum().backward()
        found.append(gradients(model))
        with torch.no_grad():
            model([ids[8:11]], state)
        logits = model([ids[11:]], state, logits="all")
        assert logits is not None
        logits.sum().backward()
    worst, name = furthest(found[0], found[1], floor=1e-6)
    assert worst < 1e-5, name


def test_a_loss_is_computed_under_inference_mode_as_without_gradients() -> None:
    model, ids = trainable("llama"), ragged(12)
    with torch.no_grad():
        wanted = loss(model, ids, chunk=4)
    with torch.inference_mode():
        assert torch.equal(loss(model, ids, chunk=4), wanted)


def test_labels_and_texts_that_are_none_are_refused() -> None:
    model = trainable("llama")
    wrong = itertools.chain(
        (partial(loss, model, [[3, 4]], labels=labels) for labels in ([[3, 4.0]], [3, 4], torch.zeros(1, 2), "ab")),
        (partial(hidden_states, model, *given) for given in (([[3]], 0), ([], 3), ([[3]], "x"), ([["a"]], 3))),
    )
    for call in wrong:
        with pytest.raises(StateError):
            call()


def test_what_follows_from_the_blocks_is_that_of_the_new_blocks_once_weights_have_changed() -> None:
    model = trainable("llama-dynamic")

    def ropes() -> list[object]:
        return [block.mixer.rope for block in model.blocks]  # type: ignore[attr-defined]

    before = ropes()
    assert [id(rope) for rope in model.network.dynamic_ropes] == [id(rope) for rope in before]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0001)
    model.new_state()  # builds the blocks again
    assert all(new is not old for new, old in zip(ropes(), before))
    assert [id(rope) for rope in model.network.dynamic_ropes] == [id(rope) for rope in ropes()]
