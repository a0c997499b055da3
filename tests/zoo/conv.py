"""Short convolutions in most layers and attention in the others, or before the attention of each layer."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.small import config

_config = partial(
    config,
    intermediate_size=120,
    num_hidden_layers=4,
    layer_types=["conv", "conv", "full_attention", "conv"],
)


def _zaya(**changes: Any) -> Any:
    sizes = {
        "head_dim": 12, "num_experts": 4, "router_hidden_size": 20, "moe_intermediate_size": 24, "layer_types": None
    }  # fmt: skip
    return _config("ZayaConfig", **{**sizes, **changes})


def _inkling(**changes: Any) -> Any:
    sizes = {
        "num_hidden_layers": 2, "head_dim": 16, "swa_head_dim": 8, "swa_num_attention_heads": 6, "d_rel": 4,
        "swa_num_key_value_heads": 3, "sliding_window_size": 13, "moe_intermediate_size": 24, "n_routed_experts": 5,
        "num_experts_per_tok": 2, "logits_mup_width_multiplier": 0.5, "route_scale": 1.5,
    }  # fmt: skip
    return _config("InklingTextConfig", **{**sizes, **changes})


def _inkling2(name: str = "Inkling2TextConfig", **changes: Any) -> Any:
    sizes = {
        "num_hidden_layers": 3, "head_dim": 16, "swa_head_dim": 8, "swa_num_attention_heads": 6, "d_rel": 4,
        "swa_num_key_value_heads": 3, "sliding_window_size": 13, "intermediate_size": 24, "n_routed_experts": 5,
        "num_experts_per_tok": 2, "route_scale": 1.5, "rel_extent": 17, "log_scaling_n_floor": 20, "layer_types": None,
        "qk_l2_clip_threshold": 3.0, "rel_l2_clip_threshold": 2.0, "mlp_gate_softcap": 0.5, "mlp_up_softcap": 0.8,
        "final_logit_softcapping": 4.0, "n_layers_per_attn_res_block": 2, "unpadded_vocab_size": 99,
    }  # fmt: skip
    return _config(name, **{**sizes, **changes})


CASES = {
    "lfm2": partial(_config, "Lfm2Config", block_multiple_of=32),
    "lfm2-biased": partial(
        _config, "Lfm2Config", block_auto_adjust_ff_dim=False, conv_bias=True, conv_L_cache=5, num_key_value_heads=6,
        layer_types=["full_attention", "conv", "conv", "full_attention"], tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    ),
    "lfm2_moe": partial(
        _config, "Lfm2MoeConfig", num_dense_layers=1, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
        routed_scaling_factor=1.5,
    ),
    "lfm2_moe-plain": partial(
        _config, "Lfm2MoeConfig", num_dense_layers=2, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=24,
        norm_topk_prob=False, use_expert_bias=False, conv_L_cache=4,
    ),
    "lfm3": partial(
        _config, "Lfm3Config", head_dim=16, sliding_window=13, conv_L_cache=4, num_hidden_layers=5, layer_types=None
    ),
    "lfm3-plain": partial(
        _config, "Lfm3Config", head_dim=8, num_key_value_heads=6, sliding_window=5, conv_bias=True, attention_bias=True,
        use_sandwich_norm=False, use_attention_gate=False, tie_word_embeddings=False,
        layer_types=["sliding_attention", "conv", "sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
        },
    ),
    "lfm3-biased": partial(
        _config, "Lfm3Config", head_dim=12, num_key_value_heads=1, sliding_window=40, attention_bias=True,
        layer_types=["full_attention", "conv", "sliding_attention", "conv"],
    ),
    "inkling": partial(
        _inkling, layer_types=["hybrid_sliding", "hybrid"], mlp_layer_types=["dense", "sparse"], rel_extent=40,
    ),
    "inkling-scaled": partial(
        _inkling, num_hidden_layers=3, layer_types=["hybrid", "hybrid_sliding", "hybrid"], conv_kernel_size=3,
        mlp_layer_types=["sparse", "dense", "sparse"], rel_extent=17, log_scaling_n_floor=20, vocab_size=104,
        unpadded_vocab_size=99, num_key_value_heads=3, swa_num_attention_heads=4, swa_num_key_value_heads=4,
        n_shared_experts=1,
    ),
    "inkling2": partial(_inkling2, layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"]),
    "inkling2-padded": partial(
        _inkling2, num_hidden_layers=2, layer_types=["hybrid", "hybrid"], conv_kernel_size=3, vocab_size=104,
        n_layers_per_attn_res_block=1, num_key_value_heads=3, rel_extent=40,
    ),
    "inkling2_loop": partial(
        _inkling2, "Inkling2LoopTextConfig", num_hidden_layers=5, loop_layer_index_start=2, loop_layer_index_end=4,
        loop_num_passes=3, loop_gate_rank=5,
        layer_types=["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    ),
    "inkling2_loop-last": partial(
        _inkling2, "Inkling2LoopTextConfig", loop_layer_index_start=1, loop_layer_index_end=3, loop_num_passes=2,
        loop_gate_rank=8, n_layers_per_attn_res_block=1, layer_types=["hybrid_sliding", "hybrid", "hybrid"],
    ),
    "zaya": partial(_zaya),
    "zaya-windows": partial(
        _zaya, num_key_value_heads=3, cca_time0=4, cca_time1=3, sliding_window=11, attention_bias=True,
        lm_head_bias=True, tie_word_embeddings=False, num_experts=3, num_hidden_layers=3,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
    ),
    "zaya-short": partial(
        _zaya, head_dim=8, num_key_value_heads=6, cca_time0=1, cca_time1=1, num_hidden_layers=2,
        rope_parameters={"hybrid": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}},
    ),
}  # fmt: skip
