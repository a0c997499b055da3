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
LAYER_NORM_EPS = {"layer_norm_eps": 1e-5}
GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
QWEN2 = {**LLAMA, **UNWINDOWED, "vocab_size": 151_936, "intermediate_size": 22_016, "max_window_layers": 28}
QWEN2_VL = {
    **QWEN2,
    **EPS,
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}
DEEPSEEK_V3 = {"routed_scaling_factor": 2.5}

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "afmoe": {**EPS, "head_dim": 128, "sliding_window": 1024},
    "apertus": {
        **EPS,
        "rope_scaling": {
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "arcee": {**EPS, "hidden_act": "relu2"},
    "axk1": {
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
    },
    "bamba": EPS,
    "cohere": {**LAYER_NORM_EPS, "rope_theta": 500_000.0},
    "cohere2": {**LAYER_NORM_EPS, "sliding_window": 4096},
    "deepseek_v3": DEEPSEEK_V3,
    "dots1": {"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False},
    "ernie4_5": {
        **EPS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "ernie4_5_moe": EPS,
    "exaone4": {**EPS, "sliding_window": 4096},
    "exaone_moe": {**EPS, "sliding_window": 4096, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    "falcon": {"layer_norm_epsilon": 1e-5, "multi_query": True, "parallel_attn": True, "tie_word_embeddings": True},
    "falcon_h1": EPS,
    "flex_olmo": {"rope_theta": 500_000.0},
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
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
    "glm": GLM,
    "glm4": GLM,
    "glm4_moe": {**EPS, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "glm4_moe_lite": {**EPS, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "gpt2": {"layer_norm_epsilon": 1e-5, "n_positions": 1024, "scale_attn_weights": True, "tie_word_embeddings": True},
    "gpt_neox": {
        **LAYER_NORM_EPS,
        "attention_bias": True,
        "use_parallel_residual": True,
        "rotary_emb_base": 10_000.0,
        "rotary_pct": 0.25,
    },
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
    "granite_swa": {**EPS, "num_key_value_heads": 4, "sliding_window": 128, "tie_word_embeddings": True},
    "granitemoe_swa": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128},
    "helium": {"rms_norm_eps": 1e-8, "head_dim": 128, "rope_theta": 100_000.0},
    "hunyuan_v1_dense": EPS,
    "hunyuan_v1_moe": EPS,
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
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {
        **EPS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_scaling": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
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
    "nanochat": {"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    "nemotron": {"norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "olmo2": EPS,
    "olmo3": {**EPS, "sliding_window": 4096},
    "olmoe": EPS,
    "phi": {**LAYER_NORM_EPS, "partial_rotary_factor": 0.5},
    "phi3": EPS,
    "phimoe": EPS,
    "qwen2": QWEN2,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen2_moe": UNWINDOWED,
    "qwen2_vl_text": QWEN2_VL,
    "qwen3": {**UNWINDOWED, "max_window_layers": 28},
    "qwen3_moe": UNWINDOWED,
    "qwen3_vl_text": {
        **LLAMA,
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rope_theta": 500_000.0,
    },
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    "smollm3": {"use_sliding_window": False, "rope_theta": 2e6},
    "solar_open": {**EPS, "head_dim": 128, "n_shared_experts": 1, "rope_theta": 1e6},
    "stablelm": {**LAYER_NORM_EPS, "partial_rotary_factor": 0.25},
    "starcoder2": {"norm_epsilon": 1e-5, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "zamba2": EPS,
}


def completed(config: Fields) -> Fields:
    """The config with the defaults of its family."""
    return Fields({**DEFAULTS.get(config.str("model_type"), {}), **config}, config.where)
