"""Models of windows, sinks and latents in GGUF: Gemma 2 and 3, gpt-oss, DeepSeek-V2 and V3.

This module adds the values that llama.cpp fixes in its code and leaves out of the file: which layers have a window, and
how the largest Gemmas scale their scores.
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
    PRE_NORMS,
    Architecture,
    Change,
    HFConfig,
    Tensors,
)

GEMMA = {
    **ATTENTION,
    **MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_NORMS: dict[str, Change] = {"norm.weight": "one more"}


def _gemma(metadata: Config, prefix: str, config: HFConfig, largest: int) -> None:
    """`largest`: layers of the model whose scores are scaled by the hidden size's share of a head."""
    scaled_by_hidden = config["num_hidden_layers"] == largest
    by_hidden = config["hidden_size"] / config["num_attention_heads"]
    config["query_pre_attn_scalar"] = by_hidden if scaled_by_hidden else config["head_dim"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["sliding_window"] = metadata.int(f"{prefix}.attention.sliding_window", 1)


def _gemma2(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    _gemma(metadata, prefix, config, largest=46)
    config["attn_logit_softcapping"] = metadata.float(f"{prefix}.attn_logit_softcapping", 1e-6, default=50.0)
    config["final_logit_softcapping"] = metadata.float(f"{prefix}.final_logit_softcapping", 1e-6, default=30.0)


def _gemma3(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    _gemma(metadata, prefix, config, largest=62)
    config["final_logit_softcapping"] = metadata.float(f"{prefix}.final_logit_softcapping", 1e-6, default=None)
    config["rope_theta"] = metadata.float(f"{prefix}.rope.freq_base", 1.0, 1e18, default=1_000_000.0)
    config["rope_local_base_freq"] = metadata.float(f"{prefix}.rope.freq_base_swa", 1.0, 1e18, default=10_000.0)


def _gpt_oss(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    _experts(metadata, prefix, config)
    config["num_local_experts"] = config["num_experts"]
    config["intermediate_size"] = config["moe_intermediate_size"]
    config["sliding_window"] = metadata.int(f"{prefix}.attention.sliding_window", 1)
    if config.get("rope_scaling", {}).get("rope_type") == "yarn":
        config["rope_scaling"]["truncate"] = False


def deepseek2(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    rope_dim = metadata.int(f"{prefix}.rope.dimension_count", 2, MOST_WIDTH)
    # Files of 2025 on give the widths of latents as key and value length, and those of heads apart.
    ending = "_mla" if f"{prefix}.attention.key_length_mla" in metadata else ""
    key, value = (metadata.int(f"{prefix}.attention.{part}_length{ending}", 1, MOST_WIDTH) for part in ("key", "value"))
    config.pop("partial_rotary_factor", None)
    config |= {
        "head_dim": rope_dim,
        "num_key_value_heads": config["num_attention_heads"],
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
        "kv_lora_rank": metadata.int(f"{prefix}.attention.kv_lora_rank", 1, MOST_WIDTH),
        "q_lora_rank": metadata.int(f"{prefix}.attention.q_lora_rank", 1, MOST_WIDTH, default=None),
        "first_k_dense_replace": metadata.int(f"{prefix}.leading_dense_block_count", 0, MOST_LAYERS, default=0),
    }
    if "rope_scaling" in config:
        # The file has 0.1 times the factor, and nothing of the other one: they are the same in all released models.
        over = metadata.float(f"{prefix}.rope.scaling.yarn_log_multiplier", 0.0, 1e3, default=0.0) * 10
        config["rope_scaling"] |= {"mscale": over, "mscale_all_dim": over} if over else {"attention_factor": 1.0}
    if not metadata.int(f"{prefix}.expert_count", 0, 4096, default=0):
        return
    _experts(metadata, prefix, config)
    groups = metadata.int(f"{prefix}.expert_group_count", 1, 4096, default=1)
    config |= {
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": metadata.int(f"{prefix}.expert_shared_count", 0, 4096, default=0),
        "routed_scaling_factor": metadata.float(f"{prefix}.expert_weights_scale", 0.0, 1e6, default=1.0),
        "norm_topk_prob": metadata.bool(f"{prefix}.expert_weights_norm", default=False),
        "n_group": groups,
        "topk_group": metadata.int(f"{prefix}.expert_group_used_count", 1, groups, default=groups),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }
    sigmoid = 2  # as llama.cpp numbers the ways to score experts; softmax is 1
    if metadata.int(f"{prefix}.expert_gating_func", 0, 16, default=1) == sigmoid:
        config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc"}


def _experts(metadata: Config, prefix: str, config: HFConfig) -> None:
    config["num_experts"] = metadata.int(f"{prefix}.expert_count", 1, 4096)
    config["num_experts_per_tok"] = metadata.int(f"{prefix}.expert_used_count", 1, 4096)
    config["moe_intermediate_size"] = metadata.int(f"{prefix}.expert_feed_forward_length", 1, MOST_WIDTH)


WINDOWS_AND_LATENTS = {
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", GEMMA, extra=_gemma2, changed=GEMMA_NORMS),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", {**GEMMA, **HEAD_NORMS}, extra=_gemma3, changed=GEMMA_NORMS
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **ATTENTION,
            **EXPERTS,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        extra=_gpt_oss,
        whole={
            "attn_sinks.weight": "self_attn.sinks",
            **{f"ffn_{part}_exps.bias": f"mlp.experts.{part}_proj_bias" for part in ("gate", "up", "down")},
        },
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {
            **MLP,
            **PRE_NORMS,
            **EXPERTS,
            **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
            "ffn_gate_inp": "mlp.gate",
            "attn_q": "self_attn.q_proj",
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            # Newer files have it in two: keys [H, Lat, Dn], values [H, Dv, Lat].
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            "attn_output": "self_attn.o_proj",
        },
        also=("deepseek_v3",),
        extra=deepseek2,
        whole={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    ),
}
