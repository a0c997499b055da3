"""What a family's configs may leave out, as the `text_config` of multimodal checkpoints does: the class's defaults.

Only what a family's `build` does not take for absent anyway. A field that is null is there, and stays null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmstate.models.weights.fields import Fields

EPS = {"rms_norm_eps": 1e-5}
UNWINDOWED = {"use_sliding_window": False, "sliding_window": 4096}
LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
QWEN2 = {**LLAMA, **UNWINDOWED, "vocab_size": 151_936, "intermediate_size": 22_016, "max_window_layers": 28}
DEEPSEEK_V3 = {"routed_scaling_factor": 2.5}

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "afmoe": {**EPS, "head_dim": 128, "sliding_window": 1024},
    "axk1": {
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
    },
    "bamba": EPS,
    "cohere2": {"sliding_window": 4096},
    "deepseek_v3": DEEPSEEK_V3,
    "dots1": {"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False},
    "ernie4_5_moe": EPS,
    "exaone_moe": {**EPS, "sliding_window": 4096, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    "falcon_h1": EPS,
    "flex_olmo": {"rope_theta": 500_000.0},
    "gemma2": {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {**EPS, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "glm4_moe_lite": {**EPS, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "gpt_oss": {
        **EPS,
        "sliding_window": 128,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "kimi_k2": DEEPSEEK_V3,
    "kimi_linear": {**EPS, "routed_scaling_factor": 2.446},
    "laguna": {
        "head_dim": 128,
        "sliding_window": 512,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 10_000.0},
        },
    },
    "llama": LLAMA,
    "llama4_text": EPS,
    "longcat_flash": {**EPS, "zero_expert_num": 256},
    "mellum": {"head_dim": 128, "sliding_window": 1024},
    "mimo_v2_flash": {
        **EPS,
        "head_dim": 192,
        "v_head_dim": 128,
        "sliding_window": 129,
        "first_k_dense_replace": 1,
        "attention_value_scale": 0.707,
    },
    "minimax": EPS,
    "minimax_m2": {"head_dim": 128},
    "mistral": {**LLAMA, "intermediate_size": 14_336, "num_key_value_heads": 8, "sliding_window": 4096},
    "mistral4": {
        "n_shared_experts": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mixtral": {**EPS, "rope_theta": 1e6},
    "olmo2": EPS,
    "olmo3": {**EPS, "sliding_window": 4096},
    "olmoe": EPS,
    "phi3": EPS,
    "phimoe": EPS,
    "qwen2": QWEN2,
    "qwen2_moe": UNWINDOWED,
    "qwen3": {**UNWINDOWED, "max_window_layers": 28},
    "qwen3_moe": UNWINDOWED,
    "smollm3": {"use_sliding_window": False, "rope_theta": 2e6},
    "solar_open": {**EPS, "head_dim": 128, "n_shared_experts": 1, "rope_theta": 1e6},
    "zamba2": EPS,
}


def completed(config: Fields) -> Fields:
    """The config with the defaults of its family."""
    return Fields({**DEFAULTS.get(config.str("model_type"), {}), **config}, config.where)
