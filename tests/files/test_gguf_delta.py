"""Gated delta rules and short convolutions from GGUF: the logits of the model that was converted.

Names come from the gguf package's own map; what llama.cpp's converter does to numbers is written down here once more,
apart from lmstate's undoing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lmstate.checkpoints.gguf.source import GgufSource
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.checkpoints.source import GroupedQuant
from lmstate.errors import ModelError
from lmstate.models.families import build
from tests.files import ggufs
from tests.zoo import CASES, randomize, text

# architecture, a case of the zoo, and what the format cannot hold or the converter insists on
EVERY_FOURTH = {"layer_types": None, "num_hidden_layers": 4}
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3next", "qwen3_next", {}),
    ("qwen3next", "qwen3_next-sparse", {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    ("qwen35", "qwen3_5", {"linear_num_key_heads": 4}),
    ("qwen35", "qwen3_5", {}),
    ("qwen35", "qwen3_5", {"linear_num_value_heads": 6}),
    ("qwen35", "qwen3_5-tied", EVERY_FOURTH),
    ("qwen35moe", "qwen3_5_moe", {}),
    ("qwen35moe", "qwen3_5_moe-tied", {**EVERY_FOURTH, "linear_num_key_heads": 1}),
    ("lfm2", "lfm2", {}),
    ("lfm2", "lfm2-biased", {"conv_bias": False}),
    ("lfm2moe", "lfm2_moe", {"routed_scaling_factor": 1.0}),
]


@pytest.mark.parametrize(("arch", "case", "changes"), MODELS, ids=[f"{arch}-{case}" for arch, case, _ in MODELS])
def test_a_converted_model_gives_the_logits_of_the_original(
    arch: str, case: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    theirs = original(case, changes)
    path = write(tmp_path / "model.gguf", arch, theirs, tmp_path / "saved")
    ours = build(WeightLoader(open_source(path), "float32"))
    assert ours.config.family == theirs.config.model_type
    ids = text(70)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    again = GgufSource.from_json(path, open_source(path).to_json(), None)
    for name in ("model.layers.0.input_layernorm.weight", "model.layers.0.conv.conv.weight"):
        if name in again.names():
            assert torch.equal(again.read(name), open_source(path).read(name))


def test_value_heads_that_key_heads_cannot_share_are_refused(tmp_path: Path) -> None:
    theirs = original("qwen3_5", {"linear_num_value_heads": 6, "linear_num_key_heads": 2})
    path = write(tmp_path / "model.gguf", "qwen35", theirs, tmp_path / "saved", {"ssm.group_count": 4})
    with pytest.raises(ModelError, match="over 4 key heads cannot share"):
        open_source(path)


@pytest.mark.parametrize("width", [32, 16])
def test_quantized_columns_of_tiled_heads_come_back_exactly(width: int, tmp_path: Path) -> None:
    changes = {"linear_num_value_heads": 6, "linear_value_head_dim": width}
    theirs = original("qwen3_5", changes)
    path = write(tmp_path / "model.gguf", "qwen35", theirs, tmp_path / "saved", quantized="ssm_out")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.0.ssm_out.weight"]
    file = gguf.dequantize(stored.data, stored.tensor_type)
    numbers = open_source(path).read("model.layers.0.linear_attn.out_proj.weight")
    assert isinstance(numbers, GroupedQuant) == (width == 32)  # smaller heads break groups of 32 apart
    whole = numbers.dequantize() if isinstance(numbers, GroupedQuant) else numbers
    assert np.array_equal(tiled(whole.numpy(), 1, 2, 3, width), file)
    assert not np.array_equal(whole.numpy(), file)


def test_heads_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    theirs = original("qwen3_5", {"linear_num_key_heads": 4})
    path = write(tmp_path / "model.gguf", "qwen35", theirs, tmp_path / "saved", drafts=1)
    ours = build(WeightLoader(open_source(path), "float32"))
    assert len(ours.blocks) == theirs.config.num_hidden_layers
    with torch.no_grad():
        torch.testing.assert_close(ours(text(9)), theirs(text(9)).logits, atol=1e-4, rtol=1e-4)


# ---- the converter


def original(case: str, changes: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    make = CASES[case]
    torch.manual_seed(0)
    config = make.func(*make.args, **{**make.keywords, **changes})  # type: ignore[attr-defined]
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    return theirs


def write(
    path: Path,
    arch: str,
    model: Any,
    folder: Path,
    keys: dict[str, Any] | None = None,
    drafts: int = 0,
    quantized: str = "-",
    more: dict[str, np.ndarray] | None = None,
) -> Path:
    """`model` as a file of architecture `arch`; `folder`: an empty one, to save it to on the way.

    `more`: tensors in place of, or beside, the model's. `keys`: metadata in place of the model's.
    `quantized`: part of the names of matrices that are written as Q8_0.
    """
    model.save_pretrained(folder)
    config, layers = model.config, model.config.num_hidden_layers + drafts
    saved = {name: value.numpy() for name, value in load_file(folder / "model.safetensors").items()}
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, layers)
    tensors = {}
    for name, value in stacked(saved, config):
        for part, numbers in changed(config, name, tiled_heads(arch, config, name, value)):
            found = names.get_name(part, (".weight", ".bias"))
            assert found is not None, part
            tensors[found] = np.ascontiguousarray(numbers)
            if quantized in found:
                tensors[found] = (gguf.quantize(tensors[found], gguf.GGMLQuantizationType.Q8_0), "Q8_0")
    for layer in range(layers - drafts, layers):
        tensors[f"blk.{layer}.nextn.eh_proj.weight"] = ggufs.floats(48, 96)
        tensors[f"blk.{layer}.attn_norm.weight"] = ggufs.floats(48)
    tensors |= more or {}
    sizes = {
        "layers": layers,
        "hidden": config.hidden_size,
        "inner": feed_forward_length(config),
        "heads": config.num_attention_heads,
        "kv_heads": kv_heads(config),
        "head_dim": config.head_dim if arch.startswith("qwen") else None,
        "eps": config.rms_norm_eps if arch.startswith("qwen") else config.norm_eps,
    }
    said = metadata(arch, config, drafts) | {f"{arch}.{key}": value for key, value in (keys or {}).items()}
    return ggufs.write(path, arch, said, tensors, sizes=sizes)


def metadata(arch: str, config: Any, drafts: int) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope.freq_base": config.rope_parameters["rope_theta"]}
    if getattr(config, "num_experts", 0):
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if arch.startswith("lfm2"):
        keys |= {"shortconv.l_cache": config.conv_L_cache}
        keys |= {"leading_dense_block_count": config.num_dense_layers} if arch == "lfm2moe" else {}
    else:
        keys |= {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "full_attention_interval": 4,
            "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
            "nextn_predict_layers": drafts,
        }
        if "expert_count" in keys:
            keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return {f"{arch}.{key}": value for key, value in keys.items()}


def feed_forward_length(config: Any) -> int:
    inner: int = config.intermediate_size
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return inner
    inner = int(config.block_ffn_dim_multiplier * int(2 * inner / 3))
    return config.block_multiple_of * ((inner + config.block_multiple_of - 1) // config.block_multiple_of)


def kv_heads(config: Any) -> Any:
    if "conv" not in config.layer_types:
        return config.num_key_value_heads
    return [0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types]


def tiled_heads(arch: str, config: Any, name: str, value: np.ndarray) -> np.ndarray:
    """Qwen3.5's value heads in the order in which ggml repeats key heads; Qwen3-Next's files keep theirs."""
    if (
        not arch.startswith(("qwen35", "qwen4"))
        or "linear_attn" not in name
        or name.endswith("linear_attn.norm.weight")
    ):
        return value
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    per_key = config.linear_num_value_heads // keys
    if name.endswith("out_proj.weight"):
        return tiled(value, 1, keys, per_key, width)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return tiled(value, 0, keys, per_key, 1)
    if name.endswith("in_proj_z.weight"):
        return tiled(value, 0, keys, per_key, width)
    first = 2 * keys * config.linear_key_head_dim  # of in_proj_qkv and conv1d: queries and keys
    return np.concatenate([value[:first], tiled(value[first:], 0, keys, per_key, width)])


def tiled(value: np.ndarray, axis: int, keys: int, per_key: int, width: int) -> np.ndarray:
    heads = [
        np.take(value, range((key * per_key + head) * width, (key * per_key + head + 1) * width), axis)
        for head in range(per_key)
        for key in range(keys)
    ]
    return np.concatenate(heads, axis)


def changed(config: Any, name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that the converter makes of one, and their names."""
    if name.endswith("A_log"):
        yield name, -np.exp(value)
    elif name.endswith("dt_bias"):
        yield name.removesuffix("dt_bias") + "dt_proj.bias", value
    elif name.endswith(("conv1d.weight", "conv.conv.weight")):
        yield name, value.squeeze(1)
    elif name.endswith("shared_expert_gate.weight"):
        yield name, value.squeeze(0)
    elif name.endswith("expert_bias"):
        yield f"{name}.bias", value
    elif "linear_attn" in name and name.endswith("in_proj_qkvz.weight"):
        keys, key_dim, value_dim = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
        per_key = config.linear_num_value_heads // keys * value_dim
        per_head_matmul = value.reshape(keys, -1, config.hidden_size)
        q, k, v, z = np.split(per_head_matmul, np.cumsum([key_dim, key_dim, per_key]), axis=1)
        flat = [part.reshape(-1, config.hidden_size) for part in (q, k, v, z)]
        yield name.replace("qkvz", "qkv"), np.concatenate(flat[:3])
        yield name.replace("qkvz", "z"), flat[3]
    elif name.endswith("norm.weight") and "qwen" in config.model_type and not name.endswith("linear_attn.norm.weight"):
        yield name, value + 1
    else:
        yield name, value


def stacked(saved: dict[str, np.ndarray], config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Experts that the checkpoint has one by one, as one tensor for each of their matrices."""
    for name, value in saved.items():
        before, _, after = name.partition(".experts.")
        if not after:
            yield name, value
        elif after.startswith("0."):
            matrix = after.removeprefix("0.")
            every = [saved[f"{before}.experts.{expert}.{matrix}"] for expert in range(config.num_experts)]
            # The gguf package knows the stacks of some families without the model's prefix only.
            prefix = before.removeprefix("model.") if "feed_forward" in before else before
            yield f"{prefix}.experts.{matrix}", np.stack(every)
