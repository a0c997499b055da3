"""Activations of 8 and of 16 bits: which products have them, what a model says of it, and that states stay apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.cli.inspect_model import weight_rows
from lmstate.models.families import build
from lmstate.ops.dense.linear import linear_reference, rounded_to_bytes
from lmstate.ops.weights.grouped import quantize
from tests.files import ggufs
from tests.zoo import CASES, auto

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    where = tmp_path_factory.mktemp("model")
    auto(CASES["llama"](**SIZES)).from_config(CASES["llama"](**SIZES)).save_pretrained(where)
    return where


def load(path: Path, activations: int | str, cache: Path | None = None, weights: str = "int4") -> lmstate.Model:
    return build(WeightLoader(open_source(path), weights, cache=cache, activations=activations))


def layer_bits(model: lmstate.Model) -> set[str]:
    """Bits of the activations that quantized matrices of the layers multiply."""
    return {row[3] for row in weight_rows(model) if row[0].startswith("blocks") and row[1].startswith("int")}


def test_layers_have_the_bits_that_were_asked_for_and_heads_keep_16(folder: Path, tmp_path: Path) -> None:
    for bits in (8, 16, "auto", 8):  # converted, and from the cache, which is one for all
        model = load(folder, bits, tmp_path)
        assert layer_bits(model) == ({"8 bits"} if bits == 8 else {"16 bits"})
        assert {row[3] for row in weight_rows(model) if "head" in row[0]} == {"16 bits"}
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "IQ4_NL"])
def test_quantized_tensors_of_gguf_multiply_8_bits_unless_16_are_asked_for(form: str, tmp_path: Path) -> None:
    def matrix(name: str, rows: int, columns: int) -> object:
        return ggufs.floats(rows, columns) if name == "attn_v" else (ggufs.blocks(form, rows, columns), form)

    file = ggufs.write(tmp_path / "model.gguf", tensors=ggufs.llama_tensors(matrix))
    for bits, expected in (("auto", {"8 bits"}), (16, {"16 bits"}), (8, {"8 bits"})):
        model = load(file, bits, weights="auto")
        assert layer_bits(model) == expected
        assert {row[3] for row in weight_rows(model) if "head" in row[0]} <= {"16 bits", "floats"}
    floats = ggufs.write(tmp_path / "floats.gguf")
    assert layer_bits(load(floats, "auto", weights="int4")) == {"16 bits"}  # rounded here, not by the file


def test_a_state_is_refused_by_a_model_with_other_activations(folder: Path) -> None:
    eight, sixteen = load(folder, 8), load(folder, 16)
    assert "activations=8,16" in eight.fingerprint and "activations" not in sixteen.fingerprint
    state = eight.new_state(1)
    eight([[1, 2, 3]], state)
    with pytest.raises(lmstate.StateError):
        sixteen([[4]], state)
    with pytest.raises(lmstate.SnapshotError):
        sixteen.new_state(1).restore(0, state.snapshot(0))


def test_unknown_bits_are_refused(folder: Path) -> None:
    with pytest.raises(lmstate.ModelError, match="unknown activations=4; expected one of 8, 16 and 'auto'"):
        lmstate.load(folder, activations=4)  # type: ignore[arg-type]


def test_8_bits_are_close_to_16_and_not_the_same(folder: Path) -> None:
    one, other = (load(folder, bits)([list(range(1, 40))]) for bits in (8, 16))
    assert one is not None and other is not None
    change, size = (one - other).square().mean().sqrt(), other.square().mean().sqrt()
    assert 0 < change < 0.05 * size


def test_gradients_go_through_the_rounding_as_if_there_were_none() -> None:
    weight, x = quantize(torch.randn(16, 64), "int4").with_activations(8), torch.randn(3, 64, requires_grad=True)
    y = linear_reference(x, weight)
    torch.testing.assert_close(y, rounded_to_bytes(x.detach()) @ weight.dequantize().T)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, weight.dequantize().sum(0).expand(3, -1))
    assert torch.equal(rounded_to_bytes(torch.zeros(2, 64)), torch.zeros(2, 64))
