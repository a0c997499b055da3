"""Mixtures of experts in GGUF: Qwen2's and Qwen3-VL's, OLMoE, GLM-4.5, MiniMax-M2, dots.llm1, EXAONE, Hunyuan, ...

This module adds the values that llama.cpp fixes in its code and leaves out of the file: whether weights of experts are
brought to a sum of 1, say.
"""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    MOST_LAYERS,
    MOST_WIDTH,
    NEXTN,
    PRE_NORMS,
    Architecture,
    HFConfig,
    Tensors,
    layer_kinds,
)

SPARSE = {**ATTENTION, **PRE_NORMS, **EXPERTS, "ffn_gate_inp": "mlp.gate"}


def shared(name: str) -> dict[str, str]:
    """The part that every token goes through, beside experts; `name`: what it is called in a layer."""
    return {f"ffn_{part}_shexp": f"{name}.{part}_proj" for part in ("gate", "up", "down")}


SHARED = shared("mlp.shared_experts")
DEEPSEEK = {**SPARSE, **MLP, **HEAD_NORMS, **SHARED, **NEXTN}
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}


def experts(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config |= {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "num_experts": metadata.int(f"{prefix}.expert_count", 1, 4096),
        "num_experts_per_tok": metadata.int(f"{prefix}.expert_used_count", 1, 4096),
        "moe_intermediate_size": metadata.int(
            f"{prefix}.expert_feed_forward_length", 1, MOST_WIDTH, default=config["intermediate_size"]
        ),
    }


def _qwen2_moe(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    common = metadata.int(f"{prefix}.expert_shared_feed_forward_length", 1, MOST_WIDTH)
    config |= {"shared_expert_intermediate_size": common, "norm_topk_prob": False}
    del config["attention_bias"]  # which would be of the output as well


def _qwen3_vl_moe(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    config["norm_topk_prob"] = True


def _olmoe(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    clip = metadata.float(f"{prefix}.attention.clamp_kqv", low=0.0, default=None)
    config |= {"norm_topk_prob": False, "clip_qkv": clip}


def _minimax_m2(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    config["intermediate_size"] = config["moe_intermediate_size"]


def deepseek_experts(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Config of the models with DeepSeek-V3's experts; heads for multi-token prediction count as blocks."""
    experts(metadata, prefix, config, tensors)
    drafts = metadata.int(f"{prefix}.nextn_predict_layers", 0, config["num_hidden_layers"] - 1, default=0)
    groups = metadata.int(f"{prefix}.expert_group_count", 1, 4096, default=1)
    config |= {
        "num_hidden_layers": config["num_hidden_layers"] - drafts,
        "num_nextn_predict_layers": drafts,
        "first_k_dense_replace": metadata.int(f"{prefix}.leading_dense_block_count", 0, MOST_LAYERS, default=0),
        "n_shared_experts": metadata.int(f"{prefix}.expert_shared_count", 0, 4096, default=0),
        "routed_scaling_factor": metadata.float(f"{prefix}.expert_weights_scale", 0.0, 1e6, default=1.0),
        "norm_topk_prob": metadata.bool(f"{prefix}.expert_weights_norm", default=False),
        "n_group": groups,
        "topk_group": metadata.int(f"{prefix}.expert_group_used_count", 1, groups, default=groups),
    }


def _hy_v3(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    deepseek_experts(metadata, prefix, config, tensors)
    width = config["moe_intermediate_size"]
    common = metadata.int(f"{prefix}.expert_shared_feed_forward_length", 1, MOST_WIDTH, default=width)
    config |= {
        "num_shared_experts": max(common // width, 1),
        "router_scaling_factor": config["routed_scaling_factor"],
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "dense"
            for layer in range(config["num_hidden_layers"])
        ],
    }


def _deepseek(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    deepseek_experts(metadata, prefix, config, tensors)
    config["norm_topk_prob"] = False


def _bailing2(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    deepseek_experts(metadata, prefix, config, tensors)
    config["use_qk_norm"] = True


def _glm4_moe(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    deepseek_experts(metadata, prefix, config, tensors)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors


def _dots1(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    deepseek_experts(metadata, prefix, config, tensors)
    config["sliding_window"] = metadata.int(f"{prefix}.attention.sliding_window", 1, default=None)


def _exaone_moe(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    blocks = config["num_hidden_layers"]
    deepseek_experts(metadata, prefix, config, tensors)
    config["num_shared_experts"] = config["n_shared_experts"]
    config["sliding_window"] = metadata.int(f"{prefix}.attention.sliding_window", 1)
    config["layer_types"] = layer_kinds(metadata, prefix, config["num_hidden_layers"], blocks)


def _ernie(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    config |= {
        "use_bias": "blk.0.attn_q.bias" in tensors,
        "moe_num_shared_experts": metadata.int(f"{prefix}.expert_shared_count", 0, 4096, default=0),
        "moe_layer_start_index": metadata.int(f"{prefix}.leading_dense_block_count", 0, MOST_LAYERS, default=0),
        "moe_layer_interval": metadata.int(f"{prefix}.interleave_moe_layer_step", 1, MOST_LAYERS, default=1),
    }


def _afmoe(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    config |= {
        "num_dense_layers": metadata.int(f"{prefix}.leading_dense_block_count", 0, MOST_LAYERS, default=0),
        "num_shared_experts": metadata.int(f"{prefix}.expert_shared_count", 0, 4096, default=0),
        "route_scale": metadata.float(f"{prefix}.expert_weights_scale", 0.0, 1e6, default=1.0),
        "route_norm": metadata.bool(f"{prefix}.expert_weights_norm", default=True),
        "sliding_window": metadata.int(f"{prefix}.attention.sliding_window", 1),
        "global_attn_every_n_layers": 4,
        "mup_enabled": True,
    }


def _hunyuan_moe(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    config["moe_topk"] = config["num_experts_per_tok"]


def _smallthinker(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    softmax = 1  # as llama.cpp numbers the ways to score experts
    window = metadata.int(f"{prefix}.attention.sliding_window", 0, default=0)
    slides = [int(window > 0 and layer % 4 > 0) for layer in range(config["num_hidden_layers"])]
    config |= {
        "moe_num_primary_experts": config["num_experts"],
        "moe_num_active_primary_experts": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_primary_router_apply_softmax": metadata.int(f"{prefix}.expert_gating_func", 0, 16, default=1) == softmax,
        # With windows, every fourth layer from the first on has neither window nor positions.
        "rope_layout": slides if window else [1] * len(slides),
        "sliding_window_layout": slides,
        "sliding_window_size": window or None,
    }


MIXTURES = {
    "smallthinker": Architecture(
        "smallthinker",
        "SmallThinkerForCausalLM",
        {
            **ATTENTION,
            **PRE_NORMS,
            "ffn_gate_inp": "block_sparse_moe.primary_router",
            **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{expert}}.{part}" for part in ("gate", "up", "down")},
        },
        extra=_smallthinker,
    ),
    "bailingmoe2": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {**DEEPSEEK, "attn_qkv": "self_attn.query_key_value", "layer_output_norm": "shared_head.norm"},
        extra=_bailing2,
        whole=CORRECTION,
    ),
    "bailingmoe": Architecture("deepseek", "DeepseekForCausalLM", DEEPSEEK, paired=True, extra=deepseek_experts),
    "deepseek": Architecture("deepseek", "DeepseekForCausalLM", DEEPSEEK, paired=True, extra=_deepseek),
    "deepseek2-ocr": Architecture("deepseek", "DeepseekForCausalLM", DEEPSEEK, extra=_deepseek, whole_rope=True),
    "hy_v3": Architecture(
        "hy_v3",
        "HYV3ForCausalLM",
        DEEPSEEK,
        extra=_hy_v3,
        whole=dict.fromkeys(("exp_probs_b", "exp_probs_b.bias"), "mlp.e_score_correction_bias"),
    ),
    "afmoe": Architecture(
        "afmoe",
        "AfmoeForCausalLM",
        {
            **DEEPSEEK,
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
        },
        extra=_afmoe,
        whole={"exp_probs_b.bias": "mlp.expert_bias"},
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {
            **SPARSE,
            **shared("mlp.shared_expert"),
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        extra=_qwen2_moe,
    ),
    "qwen3vlmoe": Architecture(
        "qwen3_vl_moe_text", "Qwen3VLMoeForConditionalGeneration", {**SPARSE, **HEAD_NORMS}, extra=_qwen3_vl_moe
    ),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", {**SPARSE, **HEAD_NORMS}, extra=_olmoe),
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {**DEEPSEEK, "post_attention_norm": "post_attention_layernorm"},
        extra=_glm4_moe,
        whole=CORRECTION,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        {**SPARSE, **HEAD_NORMS},
        extra=_minimax_m2,
        whole={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    ),
    "dots1": Architecture("dots1", "Dots1ForCausalLM", DEEPSEEK, extra=_dots1, whole=CORRECTION),
    "exaone-moe": Architecture("exaone_moe", "ExaoneMoeForCausalLM", DEEPSEEK, extra=_exaone_moe, whole=CORRECTION),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {**SPARSE, **MLP, **SHARED},
        extra=_ernie,
        whole={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        {
            **SPARSE,
            "ffn_gate_inp": "mlp.gate.wg",
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            **shared("mlp.shared_mlp"),
        },
        extra=_hunyuan_moe,
    ),
}
