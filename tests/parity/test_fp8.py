"""Checkpoints of 8-bit floats with block scales: the logits of transformers on the numbers that they stand for."""

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

from lmstate.errors import ModelError
from lmstate.models.families import build
from lmstate.models.weights.source import open_source
from lmstate.models.weights.weights import Weights
from tests.zoo import CASES, randomise, text

Tensors = dict[str, Tensor]
NAME = "model.layers.0.self_attn.o_proj.weight"


def original(case: str, changes: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    make = CASES[case]
    torch.manual_seed(0)
    config = make.func(*make.args, **{**make.keywords, **changes})  # type: ignore[attr-defined]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model)
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
    ours = build(Weights(open_source(tmp_path), "float32"))
    with torch.no_grad():
        torch.testing.assert_close(ours(text(40)), after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["auto", "int8", "bfloat16"])
def test_they_load_in_every_storage(kind: str, tmp_path: Path) -> None:
    theirs = original("deepseek_v3", {})
    write(tmp_path, theirs, 128, 128)
    ours = build(Weights(open_source(tmp_path), kind))
    theirs, ours_logits = theirs(text(40)).logits, ours(text(40))
    assert torch.nn.functional.cosine_similarity(theirs.flatten(), ours_logits.flatten(), dim=0) > 0.99


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
    "whole numbers for scales": ("no floats", partial(scale, change=lambda scales: scales.int())),
    "a vector in 8 bits": ("cannot scale", vector),
    "no blocks": ("blocks only", lambda tensors, config: config.update(weight_block_size=None)),
    "blocks of nothing": ("weight_block_size", lambda tensors, config: config.update(weight_block_size=[0, 128])),
    "three sizes": ("weight_block_size", lambda tensors, config: config.update(weight_block_size=[1, 1, 1])),
    "huge blocks": ("cannot scale", lambda tensors, config: config.update(weight_block_size=[2**31 - 1, 2**31 - 1])),
    "static": ("activation_scheme", lambda tensors, config: config.update(activation_scheme="static")),
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
        build(Weights(open_source(tmp_path), "float32"))


def test_blocks_larger_than_the_matrix_cost_no_more_than_it(tmp_path: Path) -> None:
    theirs = original("llama", {})
    write(tmp_path, theirs, 2**30, 2**30)
    ours = build(Weights(open_source(tmp_path), "float32"))
    with torch.no_grad():
        torch.testing.assert_close(ours(text(9)), theirs(text(9)).logits, atol=1e-4, rtol=1e-4)
