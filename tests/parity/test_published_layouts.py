"""Checkpoints as they were published, where configs and names differ from what transformers writes today."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from tests.zoo import pair, text

Config = dict[str, Any]
Tensors = dict[str, Tensor]
SlotCommit = Callable[[Config, Tensors], None]


def lfm2(config: Config, tensors: Tensors) -> None:
    """LFM2-1.2B's first config: the layers of attention are listed, and some names are others."""
    kinds = config.pop("layer_types")
    config["full_attn_idxs"] = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    config["block_ff_dim"] = config.pop("intermediate_size")
    config["tie_embedding"] = config.pop("tie_word_embeddings")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]


def lfm3(config: Config, tensors: Tensors) -> None:
    """What transformers calls g_proj in memory is gate_proj in files, and the other way round."""
    gates = ("self_attn.gate_proj.", "self_attn.g_proj.")
    for name in list(tensors):
        if here := next((gate for gate in gates if gate in name), None):
            tensors[name.replace(here, gates[here == gates[0]])] = tensors.pop(name)


def phi4_multimodal(config: Config, tensors: Tensors) -> None:
    """Phi-4-multimodal-instruct: adapters for pictures and sounds wrap the projections."""
    config["model_type"] = "phi4mm"
    for name in list(tensors):
        module, _, kind = name.rpartition(".")
        if name.startswith("model.layers.") and module.endswith("_proj"):
            tensors[f"{module}.base_layer.{kind}"] = tensors.pop(name)
            tensors |= {f"{module}.lora_{part}.speech.weight": torch.ones(3, 3) for part in "AB"}


def mllama(config: Config, tensors: Tensors) -> None:
    """Llama-3.2-11B-Vision: the text model lies inside a wrapper, beside a tower."""
    text = dict(config)
    config.clear()
    config |= {"model_type": "mllama", "text_config": text}
    for name in list(tensors):
        tensors[f"language_model.{name}"] = tensors.pop(name)
    tensors["vision_model.class_embedding"] = torch.ones(3)


def dory(config: Config, tensors: Tensors) -> None:
    """Attention and feed-forward parts are layers of their own, each a mixer with a rate."""
    for name in list(tensors):
        if found := re.match(r"backbone\.layers\.(\d+)\.(self_attn|mlp|lambda_1|lambda_2)", name):
            place = 2 * int(found[1]) + (found[2] in ("mlp", "lambda_2"))
            part = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}.get(found[2], "mixer")
            tensors[f"backbone.layers.{place}.{part}{name[found.end() :]}"] = tensors.pop(name)


def kimi_linear(config: Config, tensors: Tensors) -> None:
    """Kimi-Linear-48B-A3B: what is linear lies in a config of its own, layers count from 1, dense parts are `mlp`."""
    kinds = config.pop("layer_types")
    config["linear_attn_config"] = {
        "full_attn_layers": [index + 1 for index, kind in enumerate(kinds) if kind == "full_attention"],
        "kda_layers": [index + 1 for index, kind in enumerate(kinds) if kind == "linear_attention"],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    config["first_k_dense_replace"] = config.pop("mlp_layer_types").index("sparse")
    for name in list(tensors):
        if "layers.0.block_sparse_moe." in name:
            tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)


def qwen3_next(config: Config, tensors: Tensors) -> None:
    """Qwen3-Next-80B-A3B: a pattern in place of a list of layers, and heads for multi-token prediction."""
    del config["layer_types"]
    config["full_attention_interval"] = 4
    config |= {key: config["rope_parameters"][key] for key in ("rope_theta", "partial_rotary_factor")}
    del config["rope_parameters"]
    config["rope_scaling"] = None
    tensors["mtp.fc.weight"] = torch.ones(3, 3)
    tensors["mtp.layers.0.mlp.gate.weight"] = torch.ones(3, 3)


def olmo_hybrid(config: Config, tensors: Tensors) -> None:
    """One convolution in place of three, and norms under the names that transformers has in memory."""
    linear = [index for index, kind in enumerate(config["layer_types"]) if kind == "linear_attention"]
    for layer in (f"model.layers.{index}" for index in range(config["num_hidden_layers"])):
        if int(layer.rpartition(".")[2]) in linear:
            parts = [tensors.pop(f"{layer}.linear_attn.{part}_conv1d.weight") for part in "qkv"]
            tensors[f"{layer}.linear_attn.conv1d.weight"] = torch.cat(parts)
            tensors[f"{layer}.input_layernorm.weight"] = tensors.pop(f"{layer}.attention_layer_norm.weight")
        tensors[f"{layer}.post_attention_layernorm.weight"] = tensors.pop(f"{layer}.feedforward_layer_norm.weight")


def minimax(config: Config, tensors: Tensors) -> None:
    """Experts in one tensor, as transformers has them in memory."""
    for layer in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        matrices: dict[str, list[Tensor]] = {name: [] for name in ("w1", "w2", "w3")}
        for expert in range(config["num_local_experts"]):
            for name, found in matrices.items():
                found.append(tensors.pop(f"{old}.experts.{expert}.{name}.weight"))
        gate, down, up = (torch.stack(found) for found in matrices.values())
        tensors[f"{new}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{new}.experts.down_proj"] = down
        tensors[f"{new}.gate.weight"] = tensors.pop(f"{old}.gate.weight")


def kimi_k2(config: Config, tensors: Tensors) -> None:
    """Kimi-K2-Instruct: DeepSeek-V3 under a name of its own, with its rope in the older layout."""
    config["model_type"] = "kimi_k2"
    config["rope_scaling"] = {**config.pop("rope_parameters"), "type": "yarn"}
    config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
    config["rope_scaling"].pop("rope_type")


def glm4_moe(config: Config, tensors: Tensors) -> None:
    """GLM-4.5: the share of a head that rotates lies beside the rope, and a head for drafts follows the last layer."""
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["partial_rotary_factor"] = rope["rope_theta"], rope["partial_rotary_factor"]
    config["num_nextn_predict_layers"] = 1
    tensors[f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"] = torch.zeros(2, 2)


def mimo_v2_flash(config: Config, tensors: Tensors) -> None:
    """MiMo-V2-Flash: layers and their parts are told apart by numbers, and a window counts the tokens before one."""
    kinds, parts = config.pop("layer_types"), config.pop("mlp_layer_types")
    config["hybrid_layer_pattern"] = [int(kind == "sliding_attention") for kind in kinds]
    config["moe_layer_freq"] = [int(part == "sparse") for part in parts]
    config["sliding_window_size"] = config.pop("sliding_window") - 1
    ropes = config.pop("rope_parameters")
    config["rope_theta"] = ropes["full_attention"]["rope_theta"]
    config["swa_rope_theta"] = ropes["sliding_attention"]["rope_theta"]
    config["partial_rotary_factor"] = ropes["full_attention"]["partial_rotary_factor"]
    config["swa_num_key_value_heads"] = 2 * config["num_key_value_heads"]


def minimax_m2(config: Config, tensors: Tensors) -> None:
    """MiniMax-M2: how many features of a head rotate is said instead of their share."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["rotary_dim"] = int(rope["partial_rotary_factor"] * config["head_dim"])


def qwen3_vl_moe(config: Config, tensors: Tensors) -> None:
    """Qwen3-VL-30B-A3B: the sections of the rope lie in `rope_scaling`, those of text alone are all alike."""
    text = config["text_config"]
    text["rope_scaling"] = text.pop("rope_parameters")
    text["rope_theta"] = text["rope_scaling"].pop("rope_theta")


def qwen2_vl(config: Config, tensors: Tensors) -> None:
    """Qwen2-VL-2B: the text model's config and names are those of the whole, and images come beside."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    kept = {name: config[name] for name in ("model_type", "architectures", "vision_config", "tie_word_embeddings")}
    config.clear()
    config |= {**text, **kept}
    for name in list(tensors):
        plain = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        tensors[plain] = tensors.pop(name)


def gpt_neox(config: Config, tensors: Tensors) -> None:
    """Pythia-160M: what rotates has names of its own, and masks and rotary tables are stored with the weights."""
    rope = config.pop("rope_parameters")
    config |= {"rotary_emb_base": int(rope["rope_theta"]), "rotary_pct": rope["partial_rotary_factor"]}
    for layer in range(config["num_hidden_layers"]):
        inside = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{inside}.bias"] = torch.ones(1, 1, 8, 8).tril()
        tensors[f"{inside}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{inside}.rotary_emb.inv_freq"] = torch.ones(2)


def gpt2(config: Config, tensors: Tensors) -> None:
    """GPT-2: a model without a head, whose masks are stored with the weights."""
    config["n_ctx"] = config["n_positions"]
    del config["tie_word_embeddings"]
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    for layer in range(config["n_layer"]):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()


def exaone4(config: Config, tensors: Tensors) -> None:
    """EXAONE-4.0-32B: the pattern of its layers in letters, beside the list of them."""
    config["sliding_window_pattern"] = "LLLG"


def gemma(config: Config, tensors: Tensors) -> None:
    """Gemma-2B: its activation under the name of another."""
    config["hidden_act"] = "gelu"
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None


def hunyuan(config: Config, tensors: Tensors) -> None:
    """Hunyuan-7B: the rope's settings in their old place."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {**rope, "type": rope["rope_type"], "beta_fast": 32, "beta_slow": 1}


def xlstm(config: Config, tensors: Tensors) -> None:
    """With `weight_mode="fused"`, which transformers cannot make anew: matrices that read the same input are one."""
    config["weight_mode"] = "fused"
    together = {
        "mlstm_layer.qkv_opreact": ("q", "k", "v", "ogate_preact"),
        "mlstm_layer.ifgate_preact": ("igate_preact", "fgate_preact"),
        "ffn.proj_up_gate_z": ("proj_up_gate", "proj_up"),
    }
    for layer in range(config["num_blocks"]):
        for name, parts in together.items():
            part = name.partition(".")[0]
            for kind in ("weight", "bias"):
                found = [tensors.pop(f"backbone.blocks.{layer}.{part}.{each}.{kind}", None) for each in parts]
                if all(each is not None for each in found):
                    tensors[f"backbone.blocks.{layer}.{name}.{kind}"] = torch.cat(found)


CHANGES = {
    "deepseek_v3-yarn": kimi_k2,
    "glm4_moe": glm4_moe,
    "mimo_v2_flash": mimo_v2_flash,
    "minimax_m2": minimax_m2,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen2_vl": qwen2_vl,
    "qwen2_vl-window": qwen2_vl,
    "qwen2_5_vl": qwen2_vl,
    "gpt_neox": gpt_neox,
    "gpt2": gpt2,
    "exaone4": exaone4,
    "gemma": gemma,
    "hunyuan_v1_dense-alpha": hunyuan,
    "phi4_multimodal": phi4_multimodal,
    "mllama": mllama,
    "dory-loops": dory,
    "lfm2": lfm2,
    "lfm3": lfm3,
    "kimi_linear": kimi_linear,
    "qwen3_next": qwen3_next,
    "olmo_hybrid": olmo_hybrid,
    "minimax": minimax,
    "xlstm": xlstm,
    "xlstm-biased": xlstm,
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_published_layout_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    theirs, ours = pair(case)
    theirs.save_pretrained(tmp_path)
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config, tensors = json.loads(path.read_text()), load_file(weights)
    before = (json.dumps(config), set(tensors))
    CHANGES[case](config, tensors)
    assert (json.dumps(config), set(tensors)) != before
    path.write_text(json.dumps(config))
    save_file(tensors, weights, metadata={"format": "pt"})
    again = build(WeightLoader(open_source(tmp_path), "float32"))
    ids = text(40)
    torch.testing.assert_close(again(ids), ours(ids), atol=0, rtol=0)
