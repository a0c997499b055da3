"""Checkpoints that other tools quantized are refused by the names that their configs have for what was done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import lmstate
from lmstate.errors import ModelError
from tests.zoo import CASES, pair
from tests.zoo import text as ids

STEM = "model.layers.0.self_attn.q_proj"
HALF = torch.float16

# quant_method: what else the config says of it, and what the tool stores in place of a matrix [96, 48].
TOOLS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "eetq": ({}, {"weight": torch.zeros(48, 96, dtype=torch.int8), "weight_scales": torch.ones(96, dtype=HALF)}),
    "hqq": ({}, {"W_q": torch.zeros(48, 48, dtype=torch.uint8), "scale": torch.ones(96, 1), "zero": torch.ones(96, 1)}),
    "quark": ({}, {"weight": torch.zeros(96, 48, dtype=torch.float8_e4m3fn), "weight_scale": torch.ones(())}),
}  # fmt: skip


def saved(folder: Path, quantization: dict[str, Any], instead: dict[str, Tensor] | None = None) -> Path:
    """A Llama whose config names a quantization, with other tensors in place of a matrix where they are given."""
    pair("llama")[0].save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    if instead is not None:
        del tensors[f"{STEM}.weight"]
        tensors |= {f"{STEM}.{name}": tensor for name, tensor in instead.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("tool", TOOLS)
def test_the_error_names_the_tool_and_what_is_read(tool: str, tmp_path: Path) -> None:
    more, tensors = TOOLS[tool]
    with pytest.raises(ModelError) as error:
        lmstate.load(saved(tmp_path, {"quant_method": tool, **more}, tensors))
    message = str(error.value)
    assert f"quant_method {tool!r}" in message and STEM in message
    for key in ("format", "checkpoint_format", "quant_algo"):
        assert f"({more.get(key, tool)!r})" in message or key not in more
    for part in ("'mxfp4'", "'fp8'", "'gptq'", "GGUF", 'weights="int4"'):
        assert part in message


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_left_the_weights_as_they_were_is_no_error(tool: str, tmp_path: Path) -> None:
    ours = lmstate.load(saved(tmp_path, {"quant_method": tool, **TOOLS[tool][0]}), weights="float32")
    torch.testing.assert_close(ours(ids(40)), pair("llama")[1](ids(40)), atol=0, rtol=0)


@pytest.mark.parametrize("quantization", [{}, {"quant_method": None}, {"quant_method": 3}, {"quant_method": ["hqq"]}])
def test_a_config_that_names_no_tool_is_refused_for_what_is_missing(
    quantization: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="lacks the tensor"):
        lmstate.load(saved(tmp_path, quantization, TOOLS["hqq"][1]))


def test_indices_are_no_quantized_matrices(tmp_path: Path) -> None:
    text = transformers.LlamaConfig(**CASES["llama"]().to_dict())
    tower = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    theirs = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=tower, image_token_index=98)
    ).eval()
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.safetensors"
    positions = {"vision_tower.embeddings.position_ids": torch.arange(5)[None]}
    save_file(load_file(path) | positions, path, metadata={"format": "pt"})
    tokens = ids(40) % 90
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
    torch.testing.assert_close(lmstate.load(tmp_path, weights="float32")(tokens), expected, atol=1e-4, rtol=1e-4)
