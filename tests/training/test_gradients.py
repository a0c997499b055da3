"""Gradients of models that train are those of `transformers`, under the names of its checkpoint."""

from __future__ import annotations

import pytest

from tests.training.small import furthest, ragged, saved_gradients, theirs, trainable, whole_loss

# One of every layer kind, and every way in which a family changes what its checkpoint holds before it runs it.
CASES = (
    "llama-tied-mha", "qwen3_moe", "phi3", "gemma", "gpt2", "gpt_neox-sequential", "falcon-grouped", "cohere2",
    "gemma2", "gemma3n", "gpt_oss", "llama4", "mistral", "deepseek_v3", "mimo_v2_flash", "longcat_flash", "qwen3_next",
    "kimi_linear", "mamba2", "falcon_h1", "mamba", "jamba", "zamba2-adapters", "lfm2", "zaya", "recurrent_gemma",
    "minimax", "xlstm-biased", "dbrx", "zamba",
)  # fmt: skip
BOUND = 1e-4


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_transformers(case: str) -> None:
    reference, model = theirs(case), trainable(case)
    rows = ragged(24, 24)
    expected = whole_loss(reference, rows)
    got = whole_loss(model, rows)
    assert float(abs(got - expected).detach()) < 1e-5
    expected.backward()
    got.backward()
    wanted = saved_gradients(reference)
    own = {name: leaf.grad for name, leaf in model.named_parameters()}
    assert set(own) <= set(wanted)
    worst, name = furthest(own, {name: wanted[name] for name in own}, floor=1e-5)
    assert worst < BOUND, name
    nothing = [name for name, grad in own.items() if grad is None and float(wanted[name].abs().max()) > 0]
    assert not nothing
