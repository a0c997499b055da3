"""Windows, softcaps, sinks and chunks; every window and chunk is well below the 150 tokens of the tests."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.small import F, S
from tests.zoo.small import config as _config
from tests.zoo.text_parts import seeing


def _gemma3_multimodal() -> Any:
    import transformers

    text = _config("Gemma3TextConfig", head_dim=8, sliding_window=10, layer_types=[S, F, S])
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)


CASES = {
    "mistral": partial(_config, "MistralConfig", head_dim=16, sliding_window=17),
    "mistral-full-tied": partial(
        _config, "MistralConfig", num_key_value_heads=6, sliding_window=None, tie_word_embeddings=True
    ),
    "cwm": partial(
        _config, "CwmConfig", head_dim=16, sliding_window=17, num_hidden_layers=6, eos_token_id=2,
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "muse_glimmer": partial(seeing, "MuseGlimmer", head_dim=16, num_hidden_layers=4, sliding_window=14, pad_token_id=0),
    "muse_glimmer-layers": partial(
        seeing, "MuseGlimmer", head_dim=8, num_key_value_heads=3, sliding_window=10, layer_types=[S, F, S], tied=True,
        layer_rope_theta=[1e4, 1e4, 0], qk_scale_factor=2.0, output_multiplier=0.7, final_logit_softcapping=3.0,
        pad_token_id=0,
    ),
    "dory": partial(
        _config, "DoryConfig", head_dim=16, num_hidden_layers=4, sliding_window=17, n_input_layers=1, n_output_layers=1,
        initializer_range=0.15,
    ),
    "dory-loops": partial(
        _config, "DoryConfig", head_dim=8, num_key_value_heads=6, num_hidden_layers=5, sliding_window=11,
        n_input_layers=2, n_output_layers=1, n_recurrent_loops=3, layer_types=[F, S, F, S, S], attention_bias=True,
        initializer_range=0.15,
    ),
    "mixtral": partial(_config, "MixtralConfig", num_local_experts=5, num_experts_per_tok=2, sliding_window=40),
    "gemma2": partial(
        _config, "Gemma2Config", head_dim=16, sliding_window=11, query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    ),
    "gemma2-pattern": partial(
        _config, "Gemma2Config", head_dim=8, num_key_value_heads=1, sliding_window=33, layer_types=[F, S, S],
        attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False,
    ),
    "gpt_neo": partial(
        _config, "GPTNeoConfig", window_size=12, attention_types=[[["global", "local"], 1], [["local"], 1]],
    ),
    "gpt_neo-pattern": partial(
        _config, "GPTNeoConfig", hidden_size=96, window_size=30, attention_types=[[["local"], 2], [["global"], 1]],
        intermediate_size=80, activation_function="relu", tie_word_embeddings=False,
    ),
    "modernbert-decoder": partial(
        _config, "ModernBertDecoderConfig", pad_token_id=0, num_hidden_layers=5, local_attention=25,
    ),
    "modernbert-decoder-pattern": partial(
        _config, "ModernBertDecoderConfig", pad_token_id=0, hidden_size=96, local_attention=60, layer_types=[S, F, S],
        norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True, decoder_bias=False,
        tie_word_embeddings=False, hidden_activation="relu",
    ),
    "vaultgemma": partial(
        _config, "VaultGemmaConfig", head_dim=16, sliding_window=11, query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    ),
    "vaultgemma-pattern": partial(
        _config, "VaultGemmaConfig", head_dim=8, num_key_value_heads=1, sliding_window=33, layer_types=[F, S, S],
        attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False,
    ),
    "gemma3": partial(_config, "Gemma3TextConfig", head_dim=16, sliding_window=16, num_hidden_layers=7),
    "gemma3-pattern": partial(
        _config, "Gemma3TextConfig", head_dim=8, num_key_value_heads=3, sliding_window=7, layer_types=[S, F, S],
        query_pre_attn_scalar=12, final_logit_softcapping=4.0, tie_word_embeddings=False,
        rope_parameters={
            F: {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            S: {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "cohere2": partial(_config, "Cohere2Config", num_hidden_layers=5, sliding_window=20, logit_scale=0.5),
    "cohere2-pattern": partial(
        _config, "Cohere2Config", num_key_value_heads=6, layer_types=[F, S, F], sliding_window=9, logit_scale=2.0,
        attention_bias=True, tie_word_embeddings=False,
    ),
    "olmo3": partial(_config, "Olmo3Config", num_hidden_layers=4, sliding_window=12),
    "olmo3-yarn": partial(
        _config, "Olmo3Config", num_key_value_heads=6, layer_types=[F, S, S], sliding_window=50,
        tie_word_embeddings=True,
        rope_parameters={
            F: {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
            S: {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma3-multimodal": _gemma3_multimodal,
    "gpt_oss": partial(
        _config, "GptOssConfig", head_dim=16, sliding_window=13, num_local_experts=4, num_experts_per_tok=2,
        swiglu_limit=0.5,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False,
                         "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64},
    ),
    "gpt_oss-pattern": partial(
        _config, "GptOssConfig", head_dim=8, num_key_value_heads=6, sliding_window=1, num_local_experts=3,
        num_experts_per_tok=3, layer_types=[F, S, F], swiglu_alpha=1.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "gpt_oss-gate": partial(  # that of the published models, which has a body of its own
        _config, "GptOssConfig", head_dim=32, num_key_value_heads=3, sliding_window=20, num_local_experts=5,
        num_experts_per_tok=4, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "llama4": partial(
        _config, "Llama4TextConfig", head_dim=16, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=64,
        attention_chunk_size=32, num_hidden_layers=4, floor_scale=20, attn_scale=0.8,
    ),
    "llama4-interleaved": partial(
        _config, "Llama4TextConfig", head_dim=8, num_key_value_heads=3, num_local_experts=3, num_experts_per_tok=2,
        intermediate_size_mlp=64, attention_chunk_size=7, interleave_moe_layer_step=2, no_rope_layers=[0, 1, 1],
        use_qk_norm=False, attn_temperature_tuning=False, tie_word_embeddings=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
}  # fmt: skip
