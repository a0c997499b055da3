"""Checkpoints of 8-bit floats with scales: the logits of transformers on the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmstate.checkpoints.huggingface import fp8
from lmstate.checkpoints.loader import WeightLoader, transpose
from lmstate.checkpoints.open import open_source
from lmstate.errors import ModelError
from lmstate.models.families import build
from tests.zoo import CASES, randomize, text

Tensors = dict[str, Tensor]
NAME = "model.layers.0.self_attn.o_proj.weight"


def original(case: str, changes: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    make = CASES[case]
    torch.manual_seed(0)
    config = make.func(*make.args, **{**make.keywords, **changes})  # type: ignore[attr-defined]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    return model


def eight_bits(matrix: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix block by block: E4M3 numbers, scales, and the float32 numbers that they stand for."""
    numbers, whole = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn), torch.empty(matrix.shape)
    scales = torch.empty(-(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = matrix[at].abs().max() / 448.0
            numbers[at] = (matrix[at] / scales[i, j]).to(torch.float8_e4m3fn)
            whole[at] = numbers[at].float() * scales[i, j]
    return numbers, scales, whole


def write(folder: Path, theirs: Any, rows: int, columns: int) -> Tensors:
    """Saves a model with its projections in 8 bits, rounds those of the model too, and returns the file's tensors."""
    theirs.save_pretrained(folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    parameters = dict(theirs.named_parameters())
    for name in [name for name in tensors if "_proj" in name]:
        numbers, scales, whole = eight_bits(tensors[name], rows, columns)
        tensors[name], tensors[f"{name}_scale_inv"] = numbers, scales
        if name in parameters:
            parameters[name].data.copy_(whole)
            continue
        before, _, after = name.partition(".experts.")  # transformers has the experts of a layer in one tensor
        expert, part = int(after.split(".")[0]), after.split(".")[1]
        if part == "down_proj":
            parameters[f"{before}.experts.down_proj"].data[expert] = whole
        else:
            both = parameters[f"{before}.experts.gate_up_proj"].data[expert]
            (both[: len(whole)] if part == "gate_proj" else both[len(whole) :]).copy_(whole)
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, columns],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


# Sizes past 128 and no multiples of it, so that blocks are cut short; then blocks of another shape.
@pytest.mark.parametrize(
    ("case", "changes", "block"),
    [
        ("deepseek_v3", {"hidden_size": 160, "intermediate_size": 300}, (128, 128)),
        ("deepseek_v3", {}, (16, 24)),
        ("llama", {}, (32, 16)),
    ],
)
def test_blocks_of_8_bit_floats_give_the_logits_of_their_numbers(
    case: str, changes: dict[str, Any], block: tuple[int, int], tmp_path: Path
) -> None:
    theirs = original(case, changes)
    before = theirs(text(40)).logits
    tensors = write(tmp_path, theirs, *block)
    assert any(max(tensor.shape) > 1 for name, tensor in tensors.items() if name.endswith("_scale_inv"))
    after = theirs(text(40)).logits
    assert (before - after).abs().max() > 1e-2  # what was rounded is seen
    ours = build(WeightLoader(open_source(tmp_path), "float32"))
    with torch.no_grad():
        torch.testing.assert_close(ours(text(40)), after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["auto", "int8", "bfloat16"])
def test_they_load_in_every_storage(kind: str, tmp_path: Path) -> None:
    theirs = original("deepseek_v3", {})
    write(tmp_path, theirs, 128, 128)
    ours = build(WeightLoader(open_source(tmp_path), kind))
    theirs, ours_logits = theirs(text(40)).logits, ours(text(40))
    assert torch.nn.functional.cosine_similarity(theirs.flatten(), ours_logits.flatten(), dim=0) > 0.99


def rescale(scales: Tensor, shape: torch.Size, form: str) -> Tensor:
    """The scale of a matrix written out in another form: one number, or as many as it has outputs."""
    assert scales.shape == (1, 1)
    return {
        "a scalar": scales.reshape(()),
        "one number": scales.reshape(1),
        "an output": scales.expand(shape[0], 1),
        "an output, flat": scales.flatten().expand(shape[0]),
    }[form].contiguous()


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "fbgemm_fp8", "modelopt"])
@pytest.mark.parametrize("form", ["a scalar", "one number", "an output", "an output, flat"])
def test_scales_of_a_matrix_and_of_its_outputs_give_the_logits_of_their_numbers(
    form: str, method: str, tmp_path: Path
) -> None:
    theirs = original("deepseek_v3", {})
    tensors = write(tmp_path, theirs, 2**20, 2**20)  # one block a matrix
    suffix = "_scale_inv" if method == "fp8" else "_scale"
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        matrix = name.removesuffix("_scale_inv")
        tensors[matrix + suffix] = rescale(tensors.pop(name), tensors[matrix].shape, form)
        beside = "activation_scale" if method == "fp8" else "input_scale"
        tensors[matrix.removesuffix("weight") + beside] = torch.tensor(0.5)  # of activations, which are not rounded
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "activation_scheme": "static"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = build(WeightLoader(open_source(tmp_path), "float32"))
    with torch.no_grad():
        torch.testing.assert_close(ours(text(40)), theirs(text(40)).logits, atol=1e-4, rtol=1e-4)


def test_every_output_has_its_own_scale(tmp_path: Path) -> None:
    theirs = original("llama", {})
    tensors = write(tmp_path, theirs, 1, 2**20)  # a block is a row
    assert len(tensors[f"{NAME}_scale_inv"].unique()) > 1
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scaled = {name.replace("_scale_inv", "_scale"): tensor for name, tensor in tensors.items()}
    save_file(scaled, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = build(WeightLoader(open_source(tmp_path), "float32"))
    with torch.no_grad():
        torch.testing.assert_close(ours(text(40)), theirs(text(40)).logits, atol=1e-4, rtol=1e-4)


def test_blocks_of_compressed_tensors(tmp_path: Path) -> None:
    theirs = original("llama", {})
    tensors = write(tmp_path, theirs, 32, 16)
    config = json.loads((tmp_path / "config.json").read_text())
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 16]}}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scaled = {name.replace("_scale_inv", "_scale"): tensor for name, tensor in tensors.items()}
    save_file(scaled, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = build(WeightLoader(open_source(tmp_path), "float32"))
    with torch.no_grad():
        torch.testing.assert_close(ours(text(40)), theirs(text(40)).logits, atol=1e-4, rtol=1e-4)


def scale(tensors: Tensors, config: dict[str, Any], change: Callable[[Tensor], Tensor]) -> None:
    tensors[f"{NAME}_scale_inv"] = change(tensors[f"{NAME}_scale_inv"]).contiguous()


def vector(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    tensors["model.norm.weight_scale_inv"] = torch.ones(1)


DAMAGES: dict[str, tuple[str, Callable[[Tensors, dict[str, Any]], Any]]] = {
    "no scales": ("lacks", lambda tensors, config: tensors.pop(f"{NAME}_scale_inv")),
    "scales of another shape": ("cannot scale", partial(scale, change=lambda scales: scales[:, :1])),
    "scales in one row": ("cannot scale", partial(scale, change=lambda scales: scales.flatten())),
    "an infinite scale": ("infinities", partial(scale, change=lambda scales: scales / 0)),
    "whole numbers for scales": ("not floats", partial(scale, change=lambda scales: scales.int())),
    "a vector in 8 bits": ("cannot scale", vector),
    "scales of blocks without their size": (
        "cannot scale",
        lambda tensors, config: config.update(weight_block_size=None),
    ),
    "blocks of nothing": ("weight_block_size", lambda tensors, config: config.update(weight_block_size=[0, 128])),
    "three sizes": ("weight_block_size", lambda tensors, config: config.update(weight_block_size=[1, 1, 1])),
    "huge blocks": ("cannot scale", lambda tensors, config: config.update(weight_block_size=[2**31 - 1, 2**31 - 1])),
    "another method": ("holds float8", lambda tensors, config: config.update(quant_method="other")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_add_up_is_refused(damage: str, tmp_path: Path) -> None:
    tensors = write(tmp_path, original("deepseek_v3", {}), 16, 16)
    message, change = DAMAGES[damage]
    config = json.loads((tmp_path / "config.json").read_text())
    change(tensors, config["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        build(WeightLoader(open_source(tmp_path), "float32"))


def test_blocks_larger_than_the_matrix_cost_no_more_than_it(tmp_path: Path) -> None:
    theirs = original("llama", {})
    write(tmp_path, theirs, 2**30, 2**30)
    ours = build(WeightLoader(open_source(tmp_path), "float32"))
    with torch.no_grad():
        torch.testing.assert_close(ours(text(9)), theirs(text(9)).logits, atol=1e-4, rtol=1e-4)


SCALES = {
    "one": lambda of: of[:1].reshape(1),
    "one, with axes": lambda of: of[:1].reshape(1, 1, 1),
    "of each expert": lambda of: of[:3].reshape(3, 1, 1),
    "of each output": lambda of: of[:24].reshape(3, 8),
    "of each output, with an axis": lambda of: of[:24].reshape(3, 8, 1),
    "of each block": lambda of: of[:12].reshape(3, 2, 2),
}


@pytest.mark.parametrize("kind", SCALES)
def test_stacked_experts_are_dequantized_one_at_a_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, scales = torch.randn(3, 8, 64).to(torch.float8_e4m3fn), SCALES[kind](torch.rand(24) + 0.5)
    save_file({"experts": numbers, "experts_scale": scales}, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8"} | ({"weight_block_size": [4, 32]} if "block" in kind else {})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    source = open_source(tmp_path)
    whole, sizes = source.read("experts"), []
    assert isinstance(whole, Tensor)

    def recorded(numbers: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
        sizes.append(tuple(numbers.shape))
        return dequantize(numbers, scales, block)

    dequantize = fp8.dequantize
    monkeypatch.setattr(fp8, "dequantize", recorded)
    weights = WeightLoader(source, "float32")
    for index in range(3):
        assert torch.equal(weights.stacked("experts", index).dequantize(), whole[index])
        turned = weights.derived(f"{index}, turned", "experts", make=transpose, shape=(64, 8), of=index)
        assert torch.equal(turned.dequantize(), whole[index].T)
    assert sizes == [(8, 64)] * 6
