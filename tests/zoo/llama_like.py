"""Full attention: the families that are Llama but for a few lines, and every rope scaling."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.small import config as _config


def _scaled(kind: str, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **changes}}


_FACTORS = {"short_factor": [1.0, 1.3, 1.7, 2.0], "long_factor": [2.0, 3.0, 5.0, 8.0]}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_TOWERS = {  # of Phi-4-multimodal, which are left out
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "crop_size": 28,
    },
    "audio_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2, "ext_pw_out_channel": 16,
        "depthwise_separable_out_channel": 16, "nemo_conv_channels": 8, "bias_max_distance": 8,
    },
}  # fmt: skip

CASES = {
    "llama": partial(_config, "LlamaConfig"),
    "llama-tied-mha": partial(
        _config, "LlamaConfig", num_key_value_heads=6, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "internlm3": partial(_config, "InternLM3Config", head_dim=8),
    "internlm3-biases": partial(_config, "InternLM3Config", head_dim=16, attention_bias=True, mlp_bias=True),
    "iquestcoder": partial(_config, "IQuestCoderConfig", head_dim=8),
    "llama-linear": partial(_config, "LlamaConfig", head_dim=16, **_scaled("linear", factor=3.0)),
    "llama-dynamic": partial(_config, "LlamaConfig", max_position_embeddings=64, **_scaled("dynamic", factor=2.0)),
    "llama-llama3": partial(_config, "LlamaConfig", **_scaled("llama3", **_LLAMA3)),
    "llama-yarn": partial(_config, "LlamaConfig", head_dim=16, **_scaled("yarn", **_YARN)),
    "llama-longrope": partial(
        _config, "LlamaConfig", **_scaled("longrope", factor=8.0, original_max_position_embeddings=64, **_FACTORS)
    ),
    "qwen2": partial(_config, "Qwen2Config"),
    "qwen2-tied-mqa": partial(_config, "Qwen2Config", num_key_value_heads=1, tie_word_embeddings=True),
    "qwen3": partial(_config, "Qwen3Config", head_dim=16),
    "qwen3-tied": partial(_config, "Qwen3Config", head_dim=8, num_key_value_heads=6, tie_word_embeddings=True),
    "qwen3_moe": partial(
        _config, "Qwen3MoeConfig", head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "qwen3_moe-sparse": partial(
        _config, "Qwen3MoeConfig", head_dim=8, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=24,
        norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[2],
    ),
    "olmo2": partial(_config, "Olmo2Config"),
    "olmo2-mha": partial(_config, "Olmo2Config", num_key_value_heads=6, tie_word_embeddings=True),
    "smollm3": partial(_config, "SmolLM3Config", num_hidden_layers=5),
    "smollm3-pattern": partial(
        _config, "SmolLM3Config", no_rope_layers=[0, 1, 0], tie_word_embeddings=False, num_key_value_heads=3
    ),
    "phi3": partial(_config, "Phi3Config"),
    "phi4_multimodal": partial(
        _config, "Phi4MultimodalConfig", **_TOWERS, pad_token_id=0, **_scaled("default", partial_rotary_factor=0.75),
    ),
    "phi4_multimodal-tied": partial(
        _config, "Phi4MultimodalConfig", **_TOWERS, pad_token_id=0, tie_word_embeddings=True, num_key_value_heads=6,
    ),
    "phi3-longrope": partial(
        _config, "Phi3Config", original_max_position_embeddings=64, num_key_value_heads=3,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **_FACTORS,
                         "original_max_position_embeddings": 64},
    ),
}  # fmt: skip
