"""The cost of `weights="int4"` where it is dearest: a windowed model with a large tied vocabulary, and outliers."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_cached
from lmstate.cli.inspect_model import weight_rows
from lmstate.models.families import build
from lmstate.ops import quantize
from lmstate.ops.weights.grouped import quantization_error

ROWS, LENGTH = 8, 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each matrix one input in 32 has weights of 20 times the others' size; one matrix has none."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64, sliding_window=32, tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if parameter.ndim == 1:
            # What the blocks add outweighs the embedding: the text is not the same token again and again.
            parameter.data = 0.3 * noise + 4.0 * ("post_" in name)
            continue
        width = parameter.shape[1]
        if name != "model.layers.3.mlp.down_proj.weight":
            noise[:, torch.randperm(width)[: width // 32]] *= 20
        size = 2.5 if "embed" in name else 1.0
        parameter.data = noise * size / noise.square().mean().sqrt() / width**0.5
    where = tmp_path_factory.mktemp("outliers")
    model.save_pretrained(where)
    return where


def load(folder: Path, kind: str, cache: Path | None = None) -> lmstate.Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(WeightLoader(open_cached(folder, None), kind, cache=cache))


@pytest.fixture(scope="module")
def text(folder: Path) -> torch.Tensor:
    """What the model itself says, int64 `[ROWS, LENGTH]`: its perplexity is that of a text which it knows well."""
    model, generator = load(folder, "float32"), torch.Generator().manual_seed(0)
    state, said = model.new_state(rows=ROWS), [torch.arange(ROWS)[:, None] + 5]
    for _ in range(LENGTH - 1):
        logits = model(said[-1], state)
        assert logits is not None
        said.append(torch.multinomial(logits.softmax(-1), 1, generator=generator))
    return torch.cat(said, dim=1)


def perplexity(model: lmstate.Model, text: torch.Tensor) -> float:
    logits = model(text)
    assert logits is not None
    return math.exp(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()))


def test_int4_costs_a_model_with_outliers_less_than_3_percent(
    folder: Path, text: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, got = perplexity(load(folder, "float32"), text), perplexity(load(folder, "int4"), text)
    assert 1.5 < exact < 100 and abs(got / exact - 1) < 0.03
    monkeypatch.setattr("lmstate.checkpoints.loader.MOST_LOST", {"int4": 9.0, "int8": 9.0})
    assert perplexity(load(folder, "int4"), text) / exact - 1 > 0.03  # the model is one that 4 bits alone would hurt


def test_what_4_bits_would_hurt_stays_at_8_with_one_warning_at_every_start(folder: Path, tmp_path: Path) -> None:
    told = []
    for _ in range(2):  # converted, and from the cache
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = build(WeightLoader(open_cached(folder, None), "int4", cache=tmp_path))
        told.append([str(each.message) for each in caught if each.category is UserWarning])
        kinds = {row[0]: row[1] for row in weight_rows(model)}
        assert kinds["blocks 3: mlp.down"] == "int4" and kinds["blocks 0-2, 4-5: mlp.down"] == "int8"
    assert told[0] == told[1] and len(told[0]) == 1
    assert all(part in told[0][0] for part in (str(folder), "23 of 25", "4 bits", "model.layers.", '"int8"', "%"))


def test_sound_matrices_are_quantized_as_asked_without_a_word(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = WeightLoader(open_cached(folder, None), "int4")
        assert loader.linear("model.layers.3.mlp.down_proj.weight").kind == "int4"
        loader._warn_of_losses()


def test_8_bits_that_lose_much_are_warned_about(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    matrix = torch.randn(64, 64)
    matrix[:, ::32] *= 1000
    save_file({"layers.0.a.weight": matrix}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    loader = WeightLoader(open_cached(tmp_path, None), "int8")
    assert loader.linear("layers.0.a.weight").kind == "int8"
    with pytest.warns(UserWarning, match=r'1 of 1 matrices lose much in 8 bits: layers.0.a.weight \(.*"bfloat16"'):
        loader.check_all_used()


@pytest.mark.parametrize(("kind", "low", "high"), [("int4", 0.05, 0.11), ("int8", 0.003, 0.008), ("float32", 0, 0)])
def test_the_error_of_quantizing_is_of_each_input_alike(kind: str, low: float, high: float) -> None:
    matrix = torch.randn(400, 96, generator=torch.Generator().manual_seed(0))
    assert low <= quantization_error(matrix, kind) <= high
    if kind == "int4":
        matrix[:, 32] *= 30  # hurts the other 31 of its group
        lost = quantize(matrix, kind).dequantize() - matrix
        expected = (lost.square().sum(0) / matrix.square().sum(0)).mean().sqrt()
        assert float(expected) > 0.15 and quantization_error(matrix, kind) == pytest.approx(float(expected), rel=0.1)
        assert quantization_error(torch.zeros(16, 32), kind) == 0
        assert quantization_error(torch.randn(16, 40), kind) == 0  # kept as bfloat16
