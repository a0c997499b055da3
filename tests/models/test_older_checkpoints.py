"""Checkpoints as they were published, before transformers 5 changed their configs and names, are the same models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.errors import ModelError
from lmstate.models.families import build
from tests.zoo import pair, text

Config = dict[str, Any]


def gemma3(config: Config) -> None:
    ropes = config.pop("rope_parameters")
    config.pop("layer_types")
    config |= {
        "sliding_window_pattern": config.pop("_sliding_window_pattern", 6),
        "rope_theta": ropes["full_attention"]["rope_theta"],
        "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"],
        "rope_scaling": None,
    }


def gemma3_stretched(config: Config) -> None:
    ropes = config.pop("rope_parameters")
    full = ropes["full_attention"]
    config |= {"rope_theta": full["rope_theta"], "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"]}
    config["rope_scaling"] = {"rope_type": "linear", "factor": full["factor"]}


def olmo3(config: Config) -> None:
    full = config.pop("rope_parameters")["full_attention"]
    config |= {"rope_theta": full.pop("rope_theta"), "rope_scaling": full}


def one_rope(config: Config) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope


def every_other(config: Config) -> None:
    one_rope(config)
    config.pop("layer_types")


def cohere2(config: Config) -> None:
    config.pop("layer_types")
    config.pop("head_dim")
    config["sliding_window_pattern"] = 4
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]


def llama4(config: Config) -> None:
    config.pop("layer_types")
    config.pop("moe_layers")
    config |= {"no_rope_layers": [], "attn_temperature_tuning": 4, "rope_scaling": None}
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]


def flat(config: Config) -> None:
    """The text part's fields in the config itself."""
    text = config.pop("text_config")
    config |= {name: value for name, value in text.items() if name not in ("model_type", "rope_parameters")}
    config["rope_scaling"] = text["rope_parameters"]


def xdrope(config: Config) -> None:
    flat(config)
    config["rope_scaling"]["rope_type"] = "xdrope"


def deepseek(config: Config) -> None:
    """DeepSeekMoE, whose layers are those of the text part of DeepSeek-OCR 2."""
    text = config.pop("text_config")
    config |= text | {"model_type": "deepseek", "first_k_dense_replace": 1, "norm_topk_prob": False}
    del config["mlp_layer_types"]


def step3p5(config: Config) -> None:
    """A text model as published: other names, and lists with a value for the prediction head behind the layers."""
    text = config.pop("text_config")
    config |= {**text, "moe_layers_enum": "1,3", "num_nextn_predict_layers": 1, "moe_top_k": 2, "moe_num_experts": 9}
    for name in ("mlp_layer_types", "rope_parameters", "num_experts_per_tok", "n_routed_experts", "per_layer_config"):
        config.pop(name, None)
    config["attention_other_setting"] = {"num_attention_heads": config.pop("num_sliding_attention_heads")}
    config |= {"rope_theta": [5000.0, 1000.0, 1000.0, 5000.0, 1.0], "partial_rotary_factors": [0.5, 1, 1, 0.5, 1.0]}
    config["layer_types"].append("sliding_attention")


OLDER: dict[str, Callable[[Config], None]] = {
    "gemma3": gemma3,
    "gemma3-pattern": gemma3_stretched,
    "olmo3-yarn": olmo3,
    "gpt_oss": every_other,
    "cohere2": cohere2,
    "llama4": llama4,
    "deepseek_v2-greedy": one_rope,
    "deepseek_v3-yarn": one_rope,
    "deepseek_ocr2": deepseek,
    "hunyuan_vl": xdrope,
    "step3p5": step3p5,
    "paddleocr_vl": flat,
}


TEXT = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


def rewritten(folder: Path, case: str, change: Callable[[Config], None]) -> Path:
    pair(case)[0].save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", OLDER)
def test_config_of_the_old_layout_is_the_same_model(case: str, tmp_path: Path) -> None:
    folder = rewritten(tmp_path, case, OLDER[case])
    if case in ("deepseek_ocr2", "step3p5"):  # without what it sees with
        tensors = load_file(folder / "model.safetensors")
        save_file({name: x for name, x in tensors.items() if name.startswith(TEXT)}, folder / "model.safetensors")
    older = build(WeightLoader(open_source(folder), "float32"))
    ids = text(100)
    torch.testing.assert_close(older(ids), pair(case)[1](ids), atol=1e-6, rtol=1e-6)


def wrapped(folder: Path, prefix: str) -> Path:
    """The multimodal Gemma 3 with its text model's tensors under another prefix."""
    rewritten(folder, "gemma3-multimodal", lambda config: None)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("language_model.model.", prefix): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    return folder


def test_text_model_is_found_under_either_prefix(tmp_path: Path) -> None:
    model = build(WeightLoader(open_source(wrapped(tmp_path, "model.language_model.")), "float32"))
    ids = text(60)
    torch.testing.assert_close(model(ids), pair("gemma3-multimodal")[1](ids), atol=0, rtol=0)


def test_text_config_may_leave_out_what_gemma3_defaults_to(tmp_path: Path) -> None:
    def sparse(config: Config) -> None:
        for name in ("sliding_window", "query_pre_attn_scalar", "rms_norm_eps", "vocab_size"):
            config["text_config"].pop(name)

    with pytest.raises(ModelError, match="262208"):  # the vocabulary that the full models have
        build(WeightLoader(open_source(rewritten(tmp_path, "gemma3-multimodal", sparse)), "float32"))
