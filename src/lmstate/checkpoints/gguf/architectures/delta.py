"""Gated delta rules and short convolutions beside attention in GGUF: their tensors' names, and their config values."""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    MOST_WIDTH,
    NEXTN,
    OUTSIDE,
    Architecture,
    Change,
    HFConfig,
    Spans,
    Tensors,
)
from lmstate.errors import ModelError

QWEN = {
    **ATTENTION,
    **MLP,
    **HEAD_NORMS,
    **EXPERTS,
    **NEXTN,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",  # in files of 2025
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
QWEN_WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
QWEN_CHANGES: dict[str, Change] = {
    "conv1d.weight": "convolution",
    "A_log": "decay",
    "layernorm.weight": "one more",
    "q_norm.weight": "one more",
    "k_norm.weight": "one more",
    "model.norm.weight": "one more",
    ".enorm.weight": "one more",
    ".hnorm.weight": "one more",
    "shared_head.norm.weight": "one more",
}
QWEN3_5_TILED: dict[str, Spans] = {
    "linear_attn.in_proj_qkv.weight": "rows",
    "linear_attn.in_proj_z.weight": "rows",
    "linear_attn.in_proj_b.weight": "row each",
    "linear_attn.in_proj_a.weight": "row each",
    "linear_attn.A_log": "row each",
    "linear_attn.dt_bias": "row each",
    "linear_attn.conv1d.weight": "rows",
    "linear_attn.out_proj.weight": "columns",
}

LFM2 = {
    **ATTENTION,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{expert}.w1",
    "ffn_up_exps": "feed_forward.experts.{expert}.w3",
    "ffn_down_exps": "feed_forward.experts.{expert}.w2",
}
LFM2_OUTSIDE = {**OUTSIDE, "token_embd_norm.weight": "model.embedding_norm.weight"}


def _qwen_config(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    heads = metadata.int(f"{prefix}.ssm.time_step_rank", 1, MOST_WIDTH)
    inner = metadata.int(f"{prefix}.ssm.inner_size", 1, MOST_WIDTH)
    if inner % heads:
        raise ModelError(f"{metadata.where}: {inner} features cannot be shared by {heads} heads of the delta rule")
    config |= {
        "linear_num_key_heads": metadata.int(f"{prefix}.ssm.group_count", 1, MOST_WIDTH),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.int(f"{prefix}.ssm.state_size", 1, MOST_WIDTH),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": metadata.int(f"{prefix}.ssm.conv_kernel", 1, 256),
        "full_attention_interval": metadata.int(f"{prefix}.full_attention_interval", 1, 4096, default=4),
    }
    _experts(metadata, prefix, config)
    if config["num_experts"]:
        shared = metadata.int(f"{prefix}.expert_shared_feed_forward_length", 1, MOST_WIDTH)
        config["shared_expert_intermediate_size"] = shared


def _qwen3_5_config(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Blocks past the last layer are heads for multi-token prediction."""
    _qwen_config(metadata, prefix, config, tensors)
    drafts = metadata.int(f"{prefix}.nextn_predict_layers", 0, config["num_hidden_layers"] - 1, default=0)
    config["num_hidden_layers"] -= drafts
    config["num_nextn_predict_layers"] = drafts


def _lfm2_config(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    layers = range(config["num_hidden_layers"])
    attends = [f"blk.{layer}.attn_q.weight" in tensors for layer in layers]
    config |= {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["full_attention" if attention else "conv" for attention in attends],
        "conv_L_cache": metadata.int(f"{prefix}.shortconv.l_cache", 1, 256),
        "block_auto_adjust_ff_dim": False,  # the file has the width as adjusted
    }
    _experts(metadata, prefix, config)
    config["num_dense_layers"] = metadata.int(f"{prefix}.leading_dense_block_count", 0, 4096, default=0)
    config["use_expert_bias"] = any(name.endswith("exp_probs_b.bias") for name in tensors)


def _experts(metadata: Config, prefix: str, config: HFConfig) -> None:
    config["num_experts"] = metadata.int(f"{prefix}.expert_count", 0, 4096, default=0)
    if config["num_experts"]:
        config["num_experts_per_tok"] = metadata.int(f"{prefix}.expert_used_count", 1, 4096)
        config["moe_intermediate_size"] = metadata.int(f"{prefix}.expert_feed_forward_length", 1, MOST_WIDTH)


DELTAS = {
    "qwen3next": Architecture(
        "qwen3_next", "Qwen3NextForCausalLM", QWEN, whole=QWEN_WHOLE, changed=QWEN_CHANGES, extra=_qwen_config
    ),
    "qwen35": Architecture(
        "qwen3_5_text", "Qwen3_5ForCausalLM", QWEN, whole=QWEN_WHOLE, changed=QWEN_CHANGES, tiled=QWEN3_5_TILED,
        extra=_qwen3_5_config,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", QWEN, whole=QWEN_WHOLE, changed=QWEN_CHANGES, tiled=QWEN3_5_TILED,
        extra=_qwen3_5_config,
    ),
    "lfm2": Architecture(
        "lfm2", "Lfm2ForCausalLM", LFM2, outside=LFM2_OUTSIDE, changed={"conv.conv.weight": "convolution"},
        hybrid=True, extra=_lfm2_config,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe", "Lfm2MoeForCausalLM", LFM2, whole={"exp_probs_b.bias": "feed_forward.expert_bias"},
        outside=LFM2_OUTSIDE, changed={"conv.conv.weight": "convolution"}, hybrid=True, extra=_lfm2_config,
    ),
}  # fmt: skip
