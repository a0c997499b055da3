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

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "bailing_hybrid": {
        "vocab_size": 157_184,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    "bamba": EPS,
    "cohere2": {"sliding_window": 4096},
    "deepseek_v3": {"routed_scaling_factor": 2.5},
    "falcon_h1": EPS,
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
    "gemma3n_text": {
        "vocab_size": 262_400,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
    },
    "gemma4_text": {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 512,
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
    "kimi_linear": {**EPS, "routed_scaling_factor": 2.446},
    "lfm3": {
        "vocab_size": 128_000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 256,
        "tie_word_embeddings": True,
    },
    "llama": LLAMA,
    "llama4_text": EPS,
    "minimax": EPS,
    "mistral": {**LLAMA, "intermediate_size": 14_336, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {**EPS, "rope_theta": 1e6},
    "olmo2": EPS,
    "olmo3": {**EPS, "sliding_window": 4096},
    "phi3": EPS,
    "qwen2": QWEN2,
    "qwen3": {**UNWINDOWED, "max_window_layers": 28},
    "qwen3_moe": UNWINDOWED,
    "rwkv": {"vocab_size": 50_277, "hidden_size": 4096, "num_hidden_layers": 32},
    "smollm3": {"use_sliding_window": False, "rope_theta": 2e6},
    "xlstm": {
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "gate_soft_cap": 15.0,
        "output_logit_soft_cap": 30.0,
    },
    "zamba2": EPS,
    "zaya": {
        "vocab_size": 262_272,
        "hidden_size": 2048,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 16,
        "tie_word_embeddings": True,
    },
}


def completed(config: Fields) -> Fields:
    """The config with the defaults of its family."""
    return Fields({**DEFAULTS.get(config.str("model_type"), {}), **config}, config.where)
