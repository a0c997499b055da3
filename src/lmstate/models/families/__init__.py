"""The families that lmstate runs: one small file each, and a line in this table."""

from __future__ import annotations

from importlib import import_module

from lmstate.errors import ModelError
from lmstate.models.decoder import Model
from lmstate.models.families.defaults import completed
from lmstate.models.weights.weights import Weights
from lmstate.models.weights.wrapped import TextPart

# model_type of a config -> the module that builds it.
FAMILIES = {
    "afmoe": "afmoe",
    "axk1": "deepseek",
    "bamba": "bamba",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5_moe",
    "exaone_moe": "exaone_moe",
    "falcon_h1": "falcon_h1",
    "falcon_mamba": "mamba",
    "flex_olmo": "olmo2",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "glm4_moe": "glm4_moe",
    "glm4_moe_lite": "deepseek",
    "gpt_oss": "gpt_oss",
    "granite": "granitemoehybrid",
    "granitemoe": "granitemoehybrid",
    "granitemoehybrid": "granitemoehybrid",
    "granitemoeshared": "granitemoehybrid",
    "jamba": "jamba",
    "kimi_k2": "deepseek",
    "kimi_linear": "kimi_linear",
    "laguna": "laguna",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "llama": "llama",
    "llama4_text": "llama4",
    "longcat_flash": "longcat_flash",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "mellum": "mellum",
    "mimo_v2_flash": "mimo_v2_flash",
    "minimax": "minimax",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
    "mistral4": "deepseek",
    "mixtral": "mistral",
    "nemotron_h": "nemotron_h",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmo_hybrid": "olmo_hybrid",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "phimoe": "phimoe",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5_moe_text": "qwen3_next",
    "qwen3_5_text": "qwen3_next",
    "qwen3_moe": "qwen3",
    "qwen3_next": "qwen3_next",
    "qwen3_vl_moe_text": "qwen3",
    "recurrent_gemma": "recurrent_gemma",
    "smollm3": "smollm3",
    "solar_open": "glm4_moe",
    "youtu": "deepseek",
    "zamba2": "zamba2",
}


def build(w: Weights) -> Model:
    """The model of an open checkpoint; of a multimodal one, its text model.

    Raises `ModelError` for a family that is not in the table.
    """
    text = w.config.fields("text_config")
    if text is not None:
        w = w.over(TextPart(w.source, text))
    family = w.config.str("model_type")
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"models of the family {family!r} are not supported; supported are {known}")
    w.config = completed(w.config)
    model: Model = import_module(f"lmstate.models.families.{FAMILIES[family]}").build(w)
    return model
