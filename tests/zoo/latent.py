"""Latent attention: latents narrower and wider than the heads, with and without a query latent, every routing."""

from __future__ import annotations

from functools import partial

from tests.zoo.small import config

_config = partial(
    config,
    moe_intermediate_size=24,
    num_key_value_heads=6,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    kv_lora_rank=20,
    q_lora_rank=12,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
)


_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip

_INDEXED = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 12}
"""Heads enough that no two scores of a test are the same: of those transformers chooses by the length of the row."""

_v4 = partial(
    config, "DeepseekV4Config", num_hidden_layers=4, num_key_value_heads=1, moe_intermediate_size=24, head_dim=32,
    partial_rotary_factor=0.25, q_lora_rank=12, n_routed_experts=8, num_experts_per_tok=3, o_groups=2, o_lora_rank=10,
    index_n_heads=32, index_head_dim=16, index_topk=6, sliding_window=10, swiglu_limit=0.5, num_hash_layers=2,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    layer_types=[
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
)  # fmt: skip

_dots3 = partial(
    _config, "Dots3NoteTextConfig", num_hidden_layers=4, head_dim=24, shared_experts_intermediate_size=32,
    sliding_window=10, swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_q_lora_rank=16, swa_kv_lora_rank=24,
    swa_head_dim=20, swa_qk_nope_head_dim=12, swa_v_head_dim=8, n_group=2, topk_group=1, **_INDEXED,
    layer_types=["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"],
)  # fmt: skip

CASES = {
    "deepseek_v2": partial(_config, "DeepseekV2Config", topk_method="group_limited_greedy", routed_scaling_factor=3.0),
    "deepseek_v2-greedy": partial(
        _config, "DeepseekV2Config", q_lora_rank=None, kv_lora_rank=64, first_k_dense_replace=0, n_shared_experts=1,
        attention_bias=True, tie_word_embeddings=True,
        rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    ),
    "sarvam_mla": partial(_config, "SarvamMLAConfig", q_lora_rank=None),
    "deepseek_v3": partial(_config, "DeepseekV3Config", n_routed_experts=16),
    "deepseek_v3-yarn": partial(
        _config, "DeepseekV3Config", q_lora_rank=None, kv_lora_rank=10, qk_nope_head_dim=8, v_head_dim=16,
        n_group=1, topk_group=1, norm_topk_prob=False, first_k_dense_replace=2, rope_interleave=False,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v32": partial(_config, "DeepseekV32Config", n_routed_experts=16, n_shared_experts=1, **_INDEXED),
    "deepseek_v32-yarn": partial(
        _config, "DeepseekV32Config", n_shared_experts=1, first_k_dense_replace=0, **{**_INDEXED, "index_topk": 40},
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm_moe_dsa": partial(_config, "GlmMoeDsaConfig", **_INDEXED),
    "glm_moe_dsa-shared": partial(
        _config, "GlmMoeDsaConfig", num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"], **_INDEXED
    ),
    "axk2": partial(
        _config, "AXK2Config", n_group=None, topk_group=None, n_shared_experts=1, **{**_INDEXED, "index_n_heads": 16}
    ),
    "axk2-groups": partial(
        _config, "AXK2Config", n_routed_experts=16, gated_norm_rank=5, attention_bias=True,
        **{**_INDEXED, "index_topk": 40}, rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "hy_v4": partial(
        _config, "HYV4Config", n_group=1, topk_group=1, num_hidden_layers=4, swiglu_limit=0.3,
        **{**_INDEXED, "index_n_heads": 16},
    ),
    "hy_v4-streams": partial(
        _config, "HYV4Config", hc_mult=2, hc_magnitude=1.5, n_group=1, topk_group=1, swiglu_limit=0.5,
        **{**_INDEXED, "index_topk": 40}, rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v4": _v4,
    "deepseek_v4-yarn": partial(
        _v4, index_topk=40, hc_mult=2, o_groups=3, sliding_window=1, num_hash_layers=0,
        compress_rates={"compressed_sparse_attention": 3, "heavily_compressed_attention": 7},
        rope_parameters={key: value for key, value in _YARN.items() if key != "rope_theta"},
    ),
    "dots3_note": _dots3,
    "dots3_note-window": partial(_dots3, layer_types=["sliding_attention"] * 3, num_hidden_layers=3, sliding_window=17),
    "minicpm3": partial(_config, "MiniCPM3Config"),
    "minicpm3-plain": partial(
        _config, "MiniCPM3Config", q_lora_rank=None, kv_lora_rank=40, scale_emb=3, scale_depth=None,
        dim_model_base=None, v_head_dim=None, attention_bias=True, tie_word_embeddings=False,
    ),
}  # fmt: skip
