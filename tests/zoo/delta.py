"""Gated delta rule in most layers, attention in the others."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.small import config
from tests.zoo.text_parts import seeing

_config = partial(
    config,
    num_hidden_layers=4,
)


_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_KIMI = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_LING = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_PATTERN = {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3}
_QWEN4 = {
    **_DELTA, **_EXPERTS, "head_dim": 16, "hc_lowrank": 10, "ple_layer_ids": [1, 3], "ple_embed_dim": 32,
    "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4, "indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 16,
    "indexer_budget": 24, "indexer_compress_ratio": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
_GLM5: dict[str, Any] = {
    "num_hidden_layers": 4, "num_key_value_heads": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 0, "v_head_dim": 12,
    "index_n_heads": 32, "index_head_dim": 16, "index_topk": 24, "index_kpool": 4, "linear_head_dim": 8,
    "linear_num_heads": 3, "swiglu_limit": 0.5,
}  # fmt: skip

CASES = {
    "glm5_next": partial(seeing, "Glm5Next", **_GLM5),
    "glm5_next-shared": partial(
        seeing, "Glm5Next", tied=True, **{**_GLM5, "num_hidden_layers": 3, "hc_mult": 2, "linear_lower_bound": None,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"], "n_shared_experts": 2,
        "indexer_types": ["full", "full", "shared"], "mlp_layer_types": ["sparse", "dense", "sparse"],
        "index_kpool": 3, "index_topk": 30},
    ),
    "qwen4_exp": partial(_config, "Qwen4ExpTextConfig", **_QWEN4),
    "qwen4_exp-attention": partial(
        _config, "Qwen4ExpTextConfig", **{**_QWEN4, "layer_types": ["full_attention", "linear_attention",
        "full_attention"], "ple_layer_ids": [2], "split_ngram_parts": 1}, num_hidden_layers=3, hc_count=2,
        num_key_value_heads=1, ngram_size=2, ple_conv_kernel_size=3, output_gate_type="sigmoid",
        tie_word_embeddings=True,
    ),
    "qwen3_5": partial(_config, "Qwen3_5TextConfig", head_dim=16, **_DELTA),
    "qwen3_5-tied": partial(
        _config, "Qwen3_5TextConfig", head_dim=8, num_key_value_heads=6, tie_word_embeddings=True,
        linear_conv_kernel_dim=3,
        linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=8, linear_value_head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}, **_PATTERN,
    ),
    "qwen3_next-dense": partial(
        _config, "Qwen3NextConfig", head_dim=16, num_experts=0, **{**_DELTA, "linear_num_value_heads": 6}
    ),
    "qwen3_next": partial(_config, "Qwen3NextConfig", head_dim=16, **_EXPERTS, **_DELTA),
    "qwen3_next-sparse": partial(
        _config, "Qwen3NextConfig", head_dim=8, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3],
        **_EXPERTS, **_DELTA,
    ),
    "qwen3_5_moe": partial(_config, "Qwen3_5MoeTextConfig", head_dim=16, **_EXPERTS, **_DELTA),
    "qwen3_5_moe-tied": partial(
        _config, "Qwen3_5MoeTextConfig", head_dim=8, num_key_value_heads=1, tie_word_embeddings=True,
        **{**_EXPERTS, "num_experts_per_tok": 1}, **_DELTA, **_PATTERN,
    ),
    "olmo_hybrid": partial(_config, "OlmoHybridConfig", rope_parameters=None, **_DELTA),
    "olmo_hybrid-rope": partial(
        _config, "OlmoHybridConfig", num_key_value_heads=None, linear_allow_neg_eigval=False, linear_a_log_min=1.0,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, tie_word_embeddings=True,
        linear_conv_kernel_dim=3, **_PATTERN,
    ),
    "kimi_linear": partial(_config, "KimiLinearConfig", **{**_KIMI, "num_hidden_layers": 5}),
    "kimi_linear-groups": partial(
        _config, "KimiLinearConfig", q_lora_rank=20, n_group=3, topk_group=2, n_shared_experts=2, norm_topk_prob=False,
        linear_conv_kernel_dim=3, mlp_layer_types=["sparse", "dense", "sparse"], **_KIMI, **_PATTERN,
    ),
    "bailing_hybrid": partial(_config, "BailingHybridConfig", **_LING, head_dim=16, n_group=4, topk_group=2),
    "bailing_hybrid-floorless": partial(
        _config, "BailingHybridConfig", **{**_LING, **_PATTERN}, head_dim=6, n_group=1, topk_group=1,
        kda_safe_gate=False, short_conv_kernel_size=3, attention_bias=True, norm_topk_prob=False, n_shared_experts=2,
        mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "bailing_hybrid-yarn": partial(
        _config, "BailingHybridConfig", **_LING, head_dim=10, n_group=2, topk_group=1, kda_lower_bound=-0.7,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.7,
                         "mscale_all_dim": 0.9, "original_max_position_embeddings": 64},
    ),
    "lara_mini": partial(
        _config, "LaraMiniConfig", head_dim=16, sliding_window=14, num_hidden_layers=5, **_EXPERTS, **_DELTA
    ),
    "lara_mini-untied": partial(
        _config, "LaraMiniConfig", head_dim=8, sliding_window=30, num_key_value_heads=6, norm_topk_prob=False,
        num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "sliding_attention"],
        tie_word_embeddings=False, **_EXPERTS, **{**_DELTA, "linear_num_key_heads": 4},
    ),
}  # fmt: skip
