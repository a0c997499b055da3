"""Dense families beside Llama's: norms of every kind and place, ropes of a part of each head, parts side by side."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.small import F, S
from tests.zoo.small import config as _config


def _rope(theta: float = 10000.0, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **changes}}


def _seeing(name: str, sections: list[int], tied: bool = False, **changes: Any) -> Any:
    """A model of images and texts, whose positions have three axes, that share a head's features by `sections`."""
    import transformers

    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": sections}}
    text = _config(f"{name}TextConfig", **{**rope, **changes})
    own = getattr(transformers, f"{name}Config")
    small = {
        "depth": 1, "num_heads": 2, "embed_dim": 16, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 48,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    vision_config = type(own().vision_config)
    if name == "Qwen2VL":
        small["hidden_size"] = 48
    vision = vision_config(**{key: value for key, value in small.items() if key in vision_config().to_dict()})
    marks = {key: 98 for key in own().to_dict() if key.endswith("_token_id")}
    return own(text_config=text, vision_config=vision, tie_word_embeddings=tied, **marks)


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
    "cohere_compass": partial(_config, "CohereCompassTextConfig", rope_parameters={F: _rope()["rope_parameters"]}),
    "cohere_compass-mixed": partial(
        _config, "CohereCompassTextConfig", layer_types=[S, F, S], sliding_window=13, logit_scale=0.7,
        num_key_value_heads=6, tie_word_embeddings=False, rope_parameters={F: None, S: _rope(500.0)["rope_parameters"]},
    ),
    "doge": partial(_config, "DogeConfig", keep_window_size=512),
    "doge-window": partial(
        _config, "DogeConfig", keep_window_size=600, sliding_window=21, attention_bias=True, mlp_bias=True,
        num_key_value_heads=6, tie_word_embeddings=True,
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
    "cohere": partial(_config, "CohereConfig", logit_scale=0.5, tie_word_embeddings=False),
    "cohere-head-norms": partial(
        _config, "CohereConfig", num_key_value_heads=3, use_qk_norm=True, logit_scale=2.0, attention_bias=True,
        tie_word_embeddings=True,
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
    "apertus1p5": partial(_config, "Apertus1p5TextConfig"),
    "apertus-biased": partial(
        _config, "ApertusConfig", num_key_value_heads=6, attention_bias=True, tie_word_embeddings=True,
        hidden_act="relu2", **_rope(),
    ),
    "nemotron": partial(_config, "NemotronConfig", head_dim=16),
    "nemotron-biased": partial(
        _config, "NemotronConfig", head_dim=8, num_key_value_heads=6, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True, hidden_act="gelu", **_rope(partial_rotary_factor=1.0),
    ),
    "gpt_neox": partial(_config, "GPTNeoXConfig"),
    "gpt_neox-sequential": partial(
        _config, "GPTNeoXConfig", hidden_size=96, attention_bias=False, use_parallel_residual=False,
        tie_word_embeddings=True, hidden_act="gelu_fast", **_rope(partial_rotary_factor=1.0),
    ),
    "qwen2_vl": partial(_seeing, "Qwen2VL", [1, 1, 2]),
    "qwen2_vl-window": partial(
        _seeing, "Qwen2VL", [2, 1, 1], num_key_value_heads=6, use_sliding_window=True, sliding_window=14,
        max_window_layers=1, tied=True,
    ),
    "qwen2_5_vl": partial(_seeing, "Qwen2_5_VL", [1, 1, 2]),
    "qwen2_5_vl-tied": partial(_seeing, "Qwen2_5_VL", [2, 1, 1], num_key_value_heads=1, tied=True),
    "qwen3_vl": partial(_seeing, "Qwen3VL", [4, 2, 2], head_dim=16),
    "qwen3_vl-tied": partial(
        _seeing, "Qwen3VL", [2, 1, 1], head_dim=8, num_key_value_heads=6, attention_bias=True, tied=True
    ),
    "granite_swa": partial(
        _config, "GraniteSWAConfig", num_hidden_layers=5, sliding_window=12, attention_multiplier=0.3,
        embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0,
    ),
    "granite_swa-ropes": partial(
        _config, "GraniteSWAConfig", head_dim=16, num_key_value_heads=6, sliding_window=31, layer_types=[S, F, S],
        layer_rope_theta=[100.0, 0, 10000.0], attention_bias=True, mlp_bias=True, attention_multiplier=0.25,
        tie_word_embeddings=False,
    ),
    "nanochat": partial(_config, "NanoChatConfig"),
    "nanochat-tied": partial(
        _config, "NanoChatConfig", head_dim=16, num_key_value_heads=6, attention_bias=True, tie_word_embeddings=True,
        final_logit_softcapping=None, hidden_act="gelu",
    ),
    "falcon": partial(_config, "FalconConfig"),
    "falcon-grouped": partial(
        _config, "FalconConfig", new_decoder_architecture=True, num_kv_heads=3, bias=True, tie_word_embeddings=False,
        ffn_hidden_size=80,
    ),
    "falcon-one-norm": partial(
        _config, "FalconConfig", hidden_size=96, new_decoder_architecture=True, num_kv_heads=2,
        num_ln_in_parallel_attn=1, **_rope(rope_type="linear", factor=2.0),
    ),
    "falcon-sequential": partial(_config, "FalconConfig", multi_query=False, parallel_attn=False, bias=True),
    "exaone": partial(_config, "ExaoneConfig"),
    "exaone-tied": partial(
        _config, "ExaoneConfig", head_dim=16, num_key_value_heads=6, tie_word_embeddings=True,
        **_rope(rope_type="linear", factor=2.0),
    ),
    "jais2": partial(_config, "Jais2Config"),
    "jais2-unbiased": partial(
        _config, "Jais2Config", num_key_value_heads=6, attention_bias=False, mlp_bias=False, hidden_act="gelu",
        tie_word_embeddings=True,
    ),
    "persimmon": partial(_config, "PersimmonConfig"),
    "persimmon-plain": partial(
        _config, "PersimmonConfig", hidden_size=96, qk_layernorm=False, hidden_act="gelu",
        tie_word_embeddings=True, **_rope(partial_rotary_factor=0.25),
    ),
    "gptj": partial(_config, "GPTJConfig", rotary_dim=4),
    "gptj-whole-heads": partial(
        _config, "GPTJConfig", hidden_size=96, rotary_dim=16, n_inner=80, activation_function="relu",
    ),
    "codegen": partial(_config, "CodeGenConfig", rotary_dim=4),
    "codegen-whole-heads": partial(_config, "CodeGenConfig", num_attention_heads=4, rotary_dim=12, n_inner=80),
    "gpt_bigcode": partial(_config, "GPTBigCodeConfig", n_inner=80),
    "gpt_bigcode-heads": partial(
        _config, "GPTBigCodeConfig", multi_query=False, scale_attn_weights=False, tie_word_embeddings=False,
    ),
    "hyperclovax": partial(
        _config, "HyperCLOVAXConfig", attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.4,
        logits_scaling=2.0,
    ),
    "hyperclovax-plain": partial(
        _config, "HyperCLOVAXConfig", num_key_value_heads=6, use_post_norm=False, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "opt": partial(_config, "OPTConfig", ffn_dim=80),
    "opt-bare": partial(
        _config, "OPTConfig", hidden_size=96, ffn_dim=80, enable_bias=False, layer_norm_elementwise_affine=False,
        activation_function="gelu", tie_word_embeddings=False,
    ),
    "biogpt": partial(_config, "BioGptConfig"),
    "biogpt-untied": partial(
        _config, "BioGptConfig", hidden_size=96, hidden_act="relu", scale_embedding=False, tie_word_embeddings=False,
    ),
    "xglm": partial(_config, "XGLMConfig", ffn_dim=80, attention_heads=6),
    "xglm-padding": partial(
        _config, "XGLMConfig", hidden_size=96, ffn_dim=80, attention_heads=4, activation_function="relu",
        scale_embedding=False, tie_word_embeddings=False, pad_token_id=9,
    ),
    "gpt2": partial(_config, "GPT2Config", n_inner=80),
    "gpt2-untied": partial(
        _config, "GPT2Config", hidden_size=96, scale_attn_by_inverse_layer_idx=True,
        activation_function="relu", tie_word_embeddings=False,
    ),
    "bitnet": partial(_config, "BitNetConfig"),
    "bitnet-silu": partial(
        _config, "BitNetConfig", hidden_act="silu", num_key_value_heads=6, attention_bias=True,
        tie_word_embeddings=True, **_rope(500.0),
    ),
    "bloom": partial(_config, "BloomConfig", num_attention_heads=4),
    "bloom-untied": partial(_config, "BloomConfig", num_attention_heads=6, tie_word_embeddings=False),
    "mpt": partial(_config, "MptConfig", max_seq_len=512),
    "mpt-clipped": partial(
        _config, "MptConfig", num_attention_heads=4, max_seq_len=512, tie_word_embeddings=False,
        attn_config={"clip_qkv": 2.0, "softmax_scale": 0.3},
    ),
    "diffllama": partial(_config, "DiffLlamaConfig"),
    "diffllama-biased": partial(
        _config, "DiffLlamaConfig", num_attention_heads=4, num_key_value_heads=4, head_dim=8, attention_bias=True,
        tie_word_embeddings=True, **_rope(500.0),
    ),
}  # fmt: skip
