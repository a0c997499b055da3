"""Mixtures of experts by the native bodies give what transformers' own give."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from lmstate.integrations.transformers import StateCache
from lmstate.integrations.transformers.kernels import experts
from lmstate.ops import dispatch
from tests.integrations.models import DECODERS, call, decoder, text
from tests.zoo import pair

CUTS = (0, 30, 31, 32, 37, 50, 51, 60)
MIXTURES = (
    "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "deepseek_v32", "qwen3_next", "qwen3_5_moe", "jamba",
    "lfm2_moe", "inkling", "gemma4-experts", "deepseek_v4",
)  # fmt: skip
TORCHS = ("gpt_oss",)  # its weights lie [K, N], which no body reads


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    before = model.get_experts_implementation()
    model.set_experts_implementation(name)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@pytest.fixture
def tokens_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every native product of an expert, its rows."""
    ran: list[int] = []
    inner = experts.product

    def counted(library: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        ran.append(len(x))
        return inner(library, x, *args)

    monkeypatch.setattr(experts, "product", counted)
    return ran


def pieces(model: Any, ids: torch.Tensor) -> torch.Tensor:
    cache = StateCache(model)
    return torch.cat([call(model, ids[:, a:b], cache, a) for a, b in itertools.pairwise(CUTS)], 1)


def test_every_mixture_among_the_models_is_tested() -> None:
    mixtures = {name for name in DECODERS if any(hasattr(module, "has_gate") for module in decoder(name).modules())}
    assert mixtures == {*MIXTURES, *TORCHS}


@pytest.mark.parametrize("name", (*MIXTURES, *TORCHS))
def test_logits_equal_those_of_transformers(name: str, tokens_run: list[int]) -> None:
    model, ids = decoder(name), text(60, rows=2)
    with implementation(model, "eager"):
        expected = pieces(model, ids)
    with implementation(model, "lmstate"):
        torch.testing.assert_close(pieces(model, ids), expected, atol=1e-4, rtol=1e-4)
    native = dispatch.choice().library is not None and name not in TORCHS
    assert bool(tokens_run) == native and max(tokens_run, default=0) < 2 * CUTS[1], (
        "an expert reads the rows that chose it"
    )


def test_experts_without_a_gate(tokens_run: list[int]) -> None:
    model, ids = pair("nemotron_h-moe")[0], text(60, rows=2)
    with implementation(model, "eager"):
        expected = pieces(model, ids)
    with implementation(model, "lmstate"):
        torch.testing.assert_close(pieces(model, ids), expected, atol=1e-4, rtol=1e-4)
    assert tokens_run or dispatch.choice().library is None


def test_bfloat16_is_as_exact_as_that_of_transformers() -> None:
    exact = copy.deepcopy(decoder("qwen3_moe")).to(torch.bfloat16).float()
    exact.set_experts_implementation("eager")
    module = next(m for m in exact.modules() if hasattr(m, "has_gate"))
    half = copy.deepcopy(module).to(torch.bfloat16)
    x = torch.randn(8, exact.config.hidden_size).to(torch.bfloat16)
    index = torch.rand(8, exact.config.num_experts).topk(exact.config.num_experts_per_tok).indices
    weights = torch.rand(index.shape)
    with torch.no_grad():
        expected = module(x.float(), index, weights)
        errors = {}
        for name in ("eager", "lmstate"):
            half.config._experts_implementation = name
            out = half(x, index, weights.to(torch.bfloat16))
            assert out.dtype == torch.bfloat16
            errors[name] = (out - expected).square().mean().sqrt()
    assert 0 < errors["lmstate"] <= 1.25 * errors["eager"]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_gradient_is_followed(name: str) -> None:
    grads, ids = [], text(10)
    for chosen in ("grouped_mm", "lmstate"):
        model = copy.deepcopy(decoder(name))
        with implementation(model, chosen):
            model(ids).logits.square().sum().backward()
        grads.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for key, grad in grads[0].items():
        assert torch.equal(grad, grads[1][key])


def test_generate_and_graphs_and_files_go_on_as_before(tmp_path: Path) -> None:
    model, ids = copy.deepcopy(decoder("qwen3_moe")), text(20, rows=2)
    settings: dict[str, Any] = {"max_new_tokens": 8, "attention_mask": torch.ones_like(ids)}
    for way in ({"do_sample": False}, {"num_beams": 3}):
        model.set_experts_implementation("eager")
        expected = model.generate(ids, **settings, **way)
        model.set_experts_implementation("lmstate")
        assert torch.equal(model.generate(ids, **settings, **way), expected)
    expected = call(model, ids[:, :9], DynamicCache())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._experts_implementation != "lmstate"
    torch.testing.assert_close(call(again, ids[:, :9], DynamicCache()), expected, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(step(ids[:, :9], use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)
