"""Dense families beside Llama's: norms of every kind and place, ropes of a part of each head, parts side by side."""

from __future__ import annotations

from functools import partial
from typing import Any

S, F = "sliding_attention", "full_attention"


def _config(name: str, **changes: Any) -> Any:
    import transformers

    sizes = {
        "vocab_size": 99,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    return getattr(transformers, name)(**{**sizes, **changes})


def _rope(theta: float = 10000.0, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **changes}}


CASES = {
    "gemma": partial(_config, "GemmaConfig", head_dim=16),
    "gemma-mqa-untied": partial(
        _config, "GemmaConfig", head_dim=8, num_key_value_heads=1, tie_word_embeddings=False, attention_bias=True,
        **_rope(500.0),
    ),
    "ministral3": partial(
        _config, "Ministral3Config", head_dim=16,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "llama_4_scaling_beta": 0.5,
                         "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "ministral3-window": partial(
        _config, "Ministral3Config", head_dim=8, num_key_value_heads=6, sliding_window=21, tie_word_embeddings=True,
        **_rope(llama_4_scaling_beta=0.1, original_max_position_embeddings=7),
    ),
    "ministral": partial(_config, "MinistralConfig", head_dim=8, sliding_window=14),
    "ministral-pattern": partial(
        _config, "MinistralConfig", head_dim=16, num_key_value_heads=3, sliding_window=9, layer_types=[S, F, S],
        tie_word_embeddings=True,
    ),
    "glm": partial(_config, "GlmConfig", head_dim=16),
    "glm-tied": partial(
        _config, "GlmConfig", head_dim=8, num_key_value_heads=6, attention_bias=False, tie_word_embeddings=True,
        partial_rotary_factor=1.0,
    ),
    "glm4": partial(_config, "Glm4Config", head_dim=16),
    "glm4-tied": partial(
        _config, "Glm4Config", head_dim=8, num_key_value_heads=1, attention_bias=False, tie_word_embeddings=True,
        **_rope(partial_rotary_factor=0.25),
    ),
    "ernie4_5": partial(_config, "Ernie4_5Config", head_dim=16),
    "ernie4_5-biased": partial(
        _config, "Ernie4_5Config", head_dim=8, num_key_value_heads=6, use_bias=True, tie_word_embeddings=False,
    ),
    "cohere": partial(_config, "CohereConfig", logit_scale=0.5),
    "cohere-head-norms": partial(
        _config, "CohereConfig", num_key_value_heads=3, use_qk_norm=True, logit_scale=2.0, attention_bias=True,
        tie_word_embeddings=False,
    ),
    "seed_oss": partial(_config, "SeedOssConfig", head_dim=16),
    "seed_oss-biased": partial(
        _config, "SeedOssConfig", head_dim=8, num_key_value_heads=6, attention_bias=False, attention_out_bias=True,
        mlp_bias=True, tie_word_embeddings=True,
    ),
    "exaone4": partial(_config, "Exaone4Config", num_hidden_layers=5, sliding_window=13),
    "exaone4-full": partial(
        _config, "Exaone4Config", head_dim=16, num_key_value_heads=6, sliding_window=None, layer_types=[F, F, F],
        tie_word_embeddings=True,
    ),
    "exaone4-pattern": partial(
        _config, "Exaone4Config", num_key_value_heads=1, sliding_window=30, layer_types=[F, S, S],
    ),
    "olmo": partial(_config, "OlmoConfig"),
    "olmo-clipped": partial(
        _config, "OlmoConfig", num_key_value_heads=6, clip_qkv=0.7, attention_bias=True, tie_word_embeddings=True
    ),
    "phi": partial(_config, "PhiConfig"),
    "phi-head-norms": partial(
        _config, "PhiConfig", hidden_size=96, num_key_value_heads=6, qk_layernorm=True, hidden_act="relu",
        tie_word_embeddings=True, **_rope(partial_rotary_factor=0.25),
    ),
    "starcoder2": partial(_config, "Starcoder2Config", sliding_window=15),
    "starcoder2-unbiased": partial(
        _config, "Starcoder2Config", num_key_value_heads=6, use_bias=False, tie_word_embeddings=False,
    ),
    "stablelm": partial(_config, "StableLmConfig"),
    "stablelm-parallel": partial(
        _config, "StableLmConfig", hidden_size=96, num_key_value_heads=3, use_qkv_bias=True, qk_layernorm=True,
        use_parallel_residual=True, tie_word_embeddings=True, **_rope(partial_rotary_factor=0.5),
    ),
    "hunyuan_v1_dense": partial(_config, "HunYuanDenseV1Config", head_dim=16),
    "hunyuan_v1_dense-alpha": partial(
        _config, "HunYuanDenseV1Config", head_dim=8, num_key_value_heads=6, attention_bias=True,
        tie_word_embeddings=True, **_rope(rope_type="dynamic", alpha=50.0, factor=1.0),
    ),
    "arcee": partial(_config, "ArceeConfig", head_dim=16),
    "arcee-biased": partial(
        _config, "ArceeConfig", num_key_value_heads=6, attention_bias=True, mlp_bias=True, hidden_act="gelu",
        tie_word_embeddings=True,
    ),
    "helium": partial(_config, "HeliumConfig", head_dim=8),
    "helium-biased": partial(
        _config, "HeliumConfig", head_dim=8, num_key_value_heads=6, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "apertus": partial(_config, "ApertusConfig"),
    "apertus-biased": partial(
        _config, "ApertusConfig", num_key_value_heads=6, attention_bias=True, tie_word_embeddings=True,
        hidden_act="relu2", **_rope(),
    ),
    "nemotron": partial(_config, "NemotronConfig", head_dim=16),
    "nemotron-biased": partial(
        _config, "NemotronConfig", head_dim=8, num_key_value_heads=6, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True, hidden_act="gelu", **_rope(partial_rotary_factor=1.0),
    ),
}  # fmt: skip
