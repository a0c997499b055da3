"""Mixtures of experts: every router, shared experts and dense layers beside them, under attention of every kind."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.small import F, S, config

_config = partial(
    config,
    moe_intermediate_size=24,
)


def _latent(name: str, **changes: Any) -> Any:
    return _config(
        name,
        **{
            "num_key_value_heads": 6,
            "kv_lora_rank": 20,
            "q_lora_rank": 12,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            **changes,
        },
    )


def _dbrx(attends: dict[str, Any], feeds: dict[str, Any]) -> Any:
    import transformers

    return transformers.DbrxConfig(
        vocab_size=99, d_model=48, n_heads=6, n_layers=3, max_seq_len=512, attn_config=attends, ffn_config=feeds
    )


def _rope(kind: str, **changes: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **changes}


def _multimodal(**changes: Any) -> Any:
    import transformers

    text = _config("Qwen3VLMoeTextConfig", **changes).to_dict()
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 14, "out_hidden_size": 48,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    tied = changes.get("tie_word_embeddings", False)
    return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


_FACTORS = [1.0, 1.3, 1.7, 2.0]
_SECTIONS = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
_YARN = _rope("yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0)

_m3 = partial(
    _config, "MiniMaxM3VLTextConfig", head_dim=16, intermediate_size=24, num_local_experts=8, num_experts_per_tok=3,
    dense_intermediate_size=40, shared_intermediate_size=32, index_n_heads=2, index_head_dim=16, index_block_size=8,
    index_topk_blocks=3, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
)  # fmt: skip
CASES = {
    "qwen2_moe": partial(
        _config, "Qwen2MoeConfig", num_experts=5, num_experts_per_tok=2, shared_expert_intermediate_size=40
    ),
    "qwen2_moe-windows": partial(
        _config, "Qwen2MoeConfig", num_experts=4, num_experts_per_tok=3, shared_expert_intermediate_size=24,
        norm_topk_prob=True, decoder_sparse_step=2, num_hidden_layers=5, mlp_only_layers=[3], qkv_bias=False,
        use_sliding_window=True, sliding_window=14, max_window_layers=3, tie_word_embeddings=True,
    ),
    "olmoe": partial(_config, "OlmoeConfig", num_experts=5, num_experts_per_tok=2),
    "olmoe-biased": partial(
        _config, "OlmoeConfig", num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True,
        num_key_value_heads=6, tie_word_embeddings=True,
    ),
    "glm4_moe": partial(
        _config, "Glm4MoeConfig", head_dim=16, n_routed_experts=6, num_experts_per_tok=2, attention_bias=True,
        use_qk_norm=True, routed_scaling_factor=1.5,
    ),
    "glm4_moe-groups": partial(
        _config, "Glm4MoeConfig", n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, head_dim=12,
        first_k_dense_replace=2, n_shared_experts=2, norm_topk_prob=False, num_key_value_heads=6,
        rope_parameters=_rope("default", partial_rotary_factor=1.0), tie_word_embeddings=True,
    ),
    "sarvam_moe": partial(
        _config, "SarvamMoEConfig", head_dim=16, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "solar_open": partial(_config, "SolarOpenConfig", head_dim=16, n_routed_experts=6, num_experts_per_tok=2),
    "solar_open-yarn": partial(
        _config, "SolarOpenConfig", head_dim=8, n_routed_experts=4, num_experts_per_tok=1, attention_bias=True,
        n_shared_experts=2, num_key_value_heads=3, rope_parameters=_YARN,
    ),
    "glm4_moe_lite": partial(
        _latent, "Glm4MoeLiteConfig", n_routed_experts=6, num_experts_per_tok=2, attention_bias=True
    ),
    "glm4_moe_lite-groups": partial(
        _latent, "Glm4MoeLiteConfig", n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        q_lora_rank=None, n_shared_experts=2, mlp_layer_types=["sparse", "dense", "sparse"], rope_interleave=False,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8}, tie_word_embeddings=True,
    ),
    "ernie4_5_moe": partial(
        _config, "Ernie4_5_MoeConfig", moe_num_experts=6, moe_k=2, moe_num_shared_experts=2, tie_word_embeddings=False
    ),
    "ernie4_5_moe-biased": partial(
        _config, "Ernie4_5_MoeConfig", moe_num_experts=4, moe_k=3, moe_num_shared_experts=0, use_bias=True,
        num_hidden_layers=6, moe_layer_interval=2, moe_layer_start_index=2, moe_layer_end_index=4,
        num_key_value_heads=6,
    ),
    "minimax_m2": partial(
        _config, "MiniMaxM2Config", head_dim=16, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2,
        rotary_dim=8,
    ),
    "minimax_m2-whole": partial(
        _config, "MiniMaxM2Config", head_dim=8, intermediate_size=40, num_local_experts=4, num_experts_per_tok=3,
        num_key_value_heads=6, tie_word_embeddings=True,
    ),
    "minimax_m3": partial(_m3, num_hidden_layers=4),
    "minimax_m3-groups": partial(
        _m3, num_attention_heads=4, index_n_heads=4, index_block_size=5, index_topk_blocks=7, index_local_blocks=2,
        index_head_dim=24, layer_types=["minimax_m3_sparse"] * 3, mlp_layer_types=["sparse"] * 3,
    ),
    "minimax_m3-full": partial(  # blocks of whole blocks of the state, which are read where they are
        _m3, index_block_size=64, index_topk_blocks=2, num_hidden_layers=2,
        layer_types=["minimax_m3_sparse"] * 2, mlp_layer_types=["sparse"] * 2,
    ),
    "dots1": partial(
        _config, "Dots1Config", head_dim=16, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
        first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True, sliding_window=15,
        max_window_layers=1,
    ),
    "dots1-groups": partial(
        _config, "Dots1Config", head_dim=8, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        n_shared_experts=1, attention_bias=True, num_key_value_heads=3, layer_types=[S, F, S], sliding_window=30,
        tie_word_embeddings=True,
    ),
    "mistral4": partial(
        _latent, "Mistral4Config", n_routed_experts=6, num_experts_per_tok=2,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
    ),
    "mistral4-groups": partial(
        _latent, "Mistral4Config", n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        qk_nope_head_dim=8, q_lora_rank=None, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=False,
        rope_interleave=False, routed_scaling_factor=2.0, attention_bias=True, kv_lora_rank=40,
        tie_word_embeddings=True,
        rope_parameters={**_YARN, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1},
    ),
    "qwen3_vl_moe": partial(
        _multimodal, head_dim=16, num_experts=5, num_experts_per_tok=2, rope_parameters=_rope("default", **_SECTIONS)
    ),
    "qwen3_vl_moe-sparse": partial(
        _multimodal, head_dim=12, num_experts=4, num_experts_per_tok=3, num_key_value_heads=6, attention_bias=True,
        decoder_sparse_step=2, mlp_only_layers=[3], num_hidden_layers=4, moe_intermediate_size=16,
        rope_parameters=_rope("default", mrope_section=[2, 2, 2], mrope_interleaved=True), tie_word_embeddings=True,
    ),
    "youtu": partial(_latent, "YoutuConfig"),
    "youtu-yarn": partial(
        _latent, "YoutuConfig", q_lora_rank=None, attention_bias=True, rope_interleave=False, kv_lora_rank=40,
        rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9}, tie_word_embeddings=False,
    ),
    "axk1": partial(_latent, "AXK1Config", n_routed_experts=16, num_experts_per_tok=3, n_group=4, topk_group=2),
    "axk1-yarn": partial(
        _latent, "AXK1Config", n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=False,
        mlp_layer_types=["sparse", "dense", "sparse"], attention_bias=True, rope_interleave=False, kv_lora_rank=40,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, tie_word_embeddings=True,
    ),
    "exaone_moe": partial(
        _config, "ExaoneMoeConfig", head_dim=16, num_hidden_layers=5, num_experts=6, num_experts_per_tok=2,
        sliding_window=14,
    ),
    "exaone_moe-groups": partial(
        _config, "ExaoneMoeConfig", head_dim=8, num_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        num_shared_experts=2, mlp_layer_types=["sparse", "dense", "sparse"], layer_types=[F, S, F], sliding_window=9,
        num_key_value_heads=3, norm_topk_prob=False, tie_word_embeddings=True,
    ),
    "afmoe": partial(
        _config, "AfmoeConfig", head_dim=16, num_experts=6, num_experts_per_tok=2, sliding_window=13,
        num_hidden_layers=5, mup_enabled=True,
    ),
    "afmoe-biased": partial(
        _config, "AfmoeConfig", head_dim=12, num_experts=4, num_experts_per_tok=3, sliding_window=40, route_scale=2.5,
        num_shared_experts=1, num_dense_layers=2, layer_types=[F, S, F], num_key_value_heads=6, attention_bias=True,
        tie_word_embeddings=True,
    ),
    "mellum": partial(
        _config, "MellumConfig", head_dim=16, num_experts=5, num_experts_per_tok=2, layer_types=[S, F, S],
        sliding_window=15, rope_parameters={F: _YARN, S: _rope("default")},
    ),
    "mellum-dense": partial(
        _config, "MellumConfig", head_dim=8, num_experts=4, num_experts_per_tok=3, num_key_value_heads=6,
        norm_topk_prob=False, attention_bias=True, mlp_layer_types=["dense", "sparse", "dense"],
        tie_word_embeddings=True, layer_types=[F, F, S], sliding_window=50,
    ),
    "flex_olmo": partial(_config, "FlexOlmoConfig", num_experts=5, num_experts_per_tok=2),
    "flex_olmo-mha": partial(
        _config, "FlexOlmoConfig", num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, num_key_value_heads=6,
        attention_bias=True, tie_word_embeddings=True,
    ),
    "phimoe": partial(
        _config, "PhimoeConfig", intermediate_size=24, num_local_experts=6, attention_bias=True, lm_head_bias=True,
        router_jitter_noise=0.2, sliding_window=30,
    ),
    "phimoe-longrope": partial(
        _config, "PhimoeConfig", intermediate_size=40, num_local_experts=4, num_key_value_heads=6,
        tie_word_embeddings=True, router_jitter_noise=0.1,
        # transformers 5.23 rotates long texts by the short factors, unlike the published code: they are alike.
        rope_parameters=_rope("longrope", short_factor=_FACTORS, long_factor=_FACTORS, short_mscale=1.1,
                              long_mscale=1.3, original_max_position_embeddings=64),
    ),
    "mimo_v2_flash": partial(
        _config, "MiMoV2FlashConfig", head_dim=12, v_head_dim=8, num_key_value_heads=1, n_routed_experts=6,
        num_experts_per_tok=2, sliding_window=15, num_hidden_layers=4, intermediate_size=64,
    ),
    "mimo_v2_flash-groups": partial(
        _config, "MiMoV2FlashConfig", head_dim=24, v_head_dim=24, num_key_value_heads=3, n_routed_experts=8,
        num_experts_per_tok=3, n_group=4, topk_group=2, layer_types=[S, F, S], sliding_window=33, attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"], attention_value_scale=None, routed_scaling_factor=2.0,
        rope_parameters={F: _rope("default", partial_rotary_factor=0.5), S: _rope("default", partial_rotary_factor=1)},
        tie_word_embeddings=True,
    ),
    "longcat_flash": partial(
        _latent, "LongcatFlashConfig", num_hidden_layers=4, ffn_hidden_size=64, expert_ffn_hidden_size=24,
        n_routed_experts=5, zero_expert_num=3, moe_topk=3, head_dim=8,
    ),
    "longcat_flash-busy": partial(
        _latent, "LongcatFlashConfig", num_hidden_layers=2, ffn_hidden_size=40, expert_ffn_hidden_size=32,
        n_routed_experts=4, zero_expert_num=0, moe_topk=2, head_dim=8, routed_scaling_factor=1.5, kv_lora_rank=40,
        attention_bias=True, tie_word_embeddings=True,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "laguna": partial(
        _config, "LagunaConfig", head_dim=16, num_experts=5, num_experts_per_tok=2, shared_expert_intermediate_size=32,
        layer_types=[F, S, S], sliding_window=15, num_attention_heads_per_layer=[6, 4, 2],
        moe_routed_scaling_factor=1.5,
    ),
    "laguna-elements": partial(
        _config, "LagunaConfig", head_dim=8, num_experts=4, num_experts_per_tok=3, shared_expert_intermediate_size=24,
        layer_types=[S, F, S], sliding_window=40, num_key_value_heads=3, gating="per-element", attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"], tie_word_embeddings=True,
        rope_parameters={F: _YARN, S: _rope("default", partial_rotary_factor=0.5)},
    ),
    "hunyuan_v1_moe": partial(
        _config, "HunYuanMoEV1Config", head_dim=16, intermediate_size=40, num_experts=5, moe_topk=2
    ),
    "hunyuan_v1_moe-alpha": partial(
        _config, "HunYuanMoEV1Config", head_dim=8, intermediate_size=24, num_experts=4, moe_topk=[1, 3, 2],
        num_key_value_heads=6, attention_bias=True, tie_word_embeddings=True,
        rope_parameters=_rope("dynamic", alpha=50.0, factor=1.0),
    ),
    "granitemoe_swa": partial(
        _config, "GraniteMoeSWAConfig", intermediate_size=24, num_local_experts=5, num_experts_per_tok=2,
        sliding_window=14, num_hidden_layers=5, attention_multiplier=0.4, residual_multiplier=0.6,
    ),
    "granitemoe_swa-shared": partial(
        _config, "GraniteMoeSWAConfig", intermediate_size=40, num_local_experts=4, num_experts_per_tok=3,
        shared_intermediate_size=32, layer_types=[S, F, S], sliding_window=33, layer_rope_theta=[10000.0, 0, 500.0],
        num_key_value_heads=6, attention_bias=True, embedding_multiplier=3.0, logits_scaling=2.0,
        attention_multiplier=0.2, tie_word_embeddings=True,
    ),
    "dbrx": partial(
        _dbrx, {"clip_qkv": 0.7, "kv_n_heads": 2, "rope_theta": 10000.0},
        {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 2},
    ),
    "dbrx-plain": partial(
        _dbrx, {"clip_qkv": 2, "kv_n_heads": 6, "rope_theta": 10000.0},
        {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 3, "moe_normalize_expert_weights": None},
    ),
    "aria": partial(_config, "AriaTextConfig", intermediate_size=24, moe_num_experts=5, moe_topk=2),
    "aria-biased": partial(
        _config, "AriaTextConfig", intermediate_size=40, moe_num_experts=4, moe_topk=3, moe_num_shared_experts=1,
        head_dim=8, num_key_value_heads=6, attention_bias=True, tie_word_embeddings=True,
    ),
    "beam": partial(
        _config, "BeamConfig", head_dim=16, moe_intermediate_size=24, num_experts=16, num_experts_per_tok=3,
        n_group=8, topk_group=4, sliding_window=14, num_hidden_layers=4,
    ),
    "beam-biased": partial(
        _config, "BeamConfig", head_dim=8, num_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        sliding_window=33, layer_types=[F, S, S], mlp_layer_types=["sparse", "dense", "sparse"],
        norm_topk_prob=False, final_logit_softcapping=None, num_key_value_heads=6, attention_bias=True,
        tie_word_embeddings=True,
    ),
    "cohere2_moe": partial(
        _config, "Cohere2MoeConfig", head_dim=16, intermediate_size=24, num_experts=5, num_experts_per_tok=2,
        num_shared_experts=2, sliding_window=14, num_hidden_layers=5, first_k_dense_replace=1,
        prefix_dense_intermediate_size=64, logit_scale=0.5,
    ),
    "cohere2_moe-sigmoid": partial(
        _config, "Cohere2MoeConfig", head_dim=8, num_experts=4, num_experts_per_tok=3, num_shared_experts=1,
        shared_expert_combination_strategy="sum", expert_selection_fn="sigmoid", sliding_window=33,
        layer_types=[S, F, F], mlp_layer_types=["sparse", "dense", "sparse"], rms_norm_eps=1e-6,
        prefix_dense_intermediate_size=40, prefix_dense_sliding_window_pattern=2, num_key_value_heads=6,
        attention_bias=True, tie_word_embeddings=False, logit_scale=1.0,
    ),
    "flint": partial(
        _config, "FlintConfig", head_dim=16, num_experts=7, num_experts_per_tok=2, shared_expert_intermediate_size=32,
        sliding_window=14, num_hidden_layers=4,
    ),
    "flint-biased": partial(
        _config, "FlintConfig", head_dim=8, num_experts=4, num_experts_per_tok=3, shared_expert_intermediate_size=24,
        sliding_window=33, layer_types=[S, F, S], mlp_only_layers=[1], norm_topk_prob=False, num_key_value_heads=6,
        attention_bias=True, tie_word_embeddings=True,
    ),
    "hy_v3": partial(_config, "HYV3Config", head_dim=16, num_experts=6, num_experts_per_tok=2),
    "hy_v3-biased": partial(
        _config, "HYV3Config", head_dim=8, num_experts=4, num_experts_per_tok=3, num_shared_experts=2,
        mlp_layer_types=["sparse", "dense", "sparse"], num_key_value_heads=6, attention_bias=True,
        router_scaling_factor=1.5, tie_word_embeddings=True,
    ),
    "kolibri1": partial(
        _config, "Kolibri1Config", head_dim=16, num_experts=6, num_experts_per_tok=2, sliding_window=14,
        shared_expert_intermediate_size=32, num_hidden_layers=5,
    ),
    "kolibri1-normed": partial(
        _config, "Kolibri1Config", head_dim=8, num_experts=4, num_experts_per_tok=3, sliding_window=33,
        shared_expert_intermediate_size=24, layer_types=[F, S, F], norm_topk_prob=True, num_key_value_heads=6,
        tie_word_embeddings=True,
    ),
    "jetmoe": partial(
        _config, "JetMoeConfig", kv_channels=8, num_local_experts=5, intermediate_size=24, num_experts_per_tok=2
    ),
    "jetmoe-untied": partial(
        _config, "JetMoeConfig", kv_channels=16, num_local_experts=4, intermediate_size=40, num_experts_per_tok=3,
        num_key_value_heads=3, tie_word_embeddings=False,
    ),
}  # fmt: skip
