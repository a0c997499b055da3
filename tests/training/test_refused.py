"""Gradients that would be wrong are refused."""

from __future__ import annotations

import pytest
import torch

import lmstate
import lmstate.training
from lmstate.errors import ModelError, StateError, UnsupportedError
from lmstate.kv import Quantized, SnapKV
from tests.training.small import ragged, saved, theirs, trainable


@pytest.mark.parametrize("kv", [Quantized(8), Quantized(4), SnapKV(80)])
@pytest.mark.parametrize("commit", [True, False])
def test_gradients_through_a_state_that_rounds_or_evicts_are_refused(kv: object, commit: bool) -> None:
    model = trainable("llama")
    state = model.new_state(kv=kv)  # type: ignore[arg-type]
    model(ragged(100), state)
    logits = model(ragged(7), state, commit=commit)
    assert logits is not None
    with pytest.raises(UnsupportedError, match="no_grad"):
        logits.sum().backward()


def test_gradients_through_a_plain_state_are_right() -> None:
    model = trainable("mamba2")
    (ids,) = ragged(30)
    whole = model([ids])
    assert whole is not None
    whole[0, -1].square().sum().backward()
    wanted = {name: leaf.grad for name, leaf in model.named_parameters()}
    model.zero_grad()
    state = model.new_state()
    model([ids[:13]], state)
    last = model([ids[13:]], state)
    assert last is not None
    last[0].square().sum().backward()
    for name, leaf in model.named_parameters():
        torch.testing.assert_close(leaf.grad, wanted[name], atol=1e-3, rtol=1e-3)


def test_a_state_of_weights_that_have_changed_is_refused() -> None:
    model = trainable("qwen3_next")
    with torch.no_grad():
        state = model.new_state()
        model(ragged(9), state)
        before = model.fingerprint
        next(model.parameters()).add_(0.01)
        with pytest.raises(StateError, match="weights of this model changed"):
            model([[5]], state)
        assert model.fingerprint != before
        fresh = model.new_state()
        model(ragged(9), fresh)


def test_options_that_do_not_go_together_are_refused() -> None:
    with saved(theirs("llama")) as folder:
        for options in (
            {"trainable": "some"},
            {"trainable": True, "weights": "int8"},
            {"trainable": True, "adapter": folder},
            {"merge": True},
            {"lora": lmstate.training.LoraConfig()},
            {"trainable": "lora", "lora": {"rank": 4}},
            {"trainable": "lora", "lora": lmstate.training.LoraConfig(targets=["nothing"])},
            {"trainable": "lora", "lora": lmstate.training.LoraConfig(targets=["q_proj", "k_prj"])},
        ):
            with pytest.raises(ModelError):
                lmstate.load(folder, **options)  # type: ignore[arg-type]
