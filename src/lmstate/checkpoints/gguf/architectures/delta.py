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
    layer_kinds,
)
from lmstate.checkpoints.gguf.architectures.moe import CORRECTION, SPARSE
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

RWKV_PROJECTIONS = {"r": "receptance", "k": "key", "v": "value", "o": "output"}
LORA = {0: "2.bias", 1: "0.weight", 2: "2.weight"}

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
FULL, SLIDING = "full_attention", "sliding_attention"
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


def qwen3_5_config(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
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


def _inkling(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    _experts(metadata, prefix, config)
    layers, heads, dim = (config[name] for name in ("num_hidden_layers", "num_attention_heads", "head_dim"))
    kinds = layer_kinds(metadata, prefix, layers)
    kv_heads = metadata.ints(f"{prefix}.attention.head_count_kv", layers, 1, MOST_WIDTH)
    if kinds is None:
        raise ModelError(f"{metadata.where} does not list which of its layers have a window; it is incomplete")
    counts = {kind: {count for count, own in zip(kv_heads, kinds) if own == kind} for kind in (FULL, SLIDING)}
    if any(len(found) > 1 for found in counts.values()):
        raise ModelError(f"{metadata.where} has other numbers of key heads in layers that are alike: {kv_heads}")
    dense = metadata.int(f"{prefix}.dense_block_count", 0, layers, default=0)
    window = metadata.int(f"{prefix}.attention.sliding_window", 1)
    if metadata.int(f"{prefix}.rel_extent_swa", 1, default=window) != window:
        raise ModelError(f"{metadata.where} weighs keys in a window of {window} by other distances than these")
    config |= {
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": metadata.int(f"{prefix}.expert_shared_count", 1, MOST_WIDTH),
        "route_scale": metadata.float(f"{prefix}.expert_weights_scale", 0.0),
        "layer_types": ["hybrid_sliding" if kind == SLIDING else "hybrid" for kind in kinds],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        "num_key_value_heads": max(counts[FULL], default=heads),
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": max(counts[SLIDING], default=heads),
        "swa_head_dim": dim,
        "sliding_window_size": window,
        "d_rel": metadata.int(f"{prefix}.d_rel", 1, MOST_WIDTH),
        "rel_extent": metadata.int(f"{prefix}.rel_extent", 1, MOST_WIDTH),
        "conv_kernel_size": metadata.int(f"{prefix}.shortconv_kernel", 1, 256),
        "logits_mup_width_multiplier": metadata.float(f"{prefix}.logit_scale_denom", 1e-6, 1e6),
        "log_scaling_n_floor": metadata.int(f"{prefix}.log_scaling_n_floor", 0, default=0) or None,
        "log_scaling_alpha": metadata.float(f"{prefix}.log_scaling_alpha", 0.0, 1e6, default=0.1),
        "unpadded_vocab_size": metadata.int(f"{prefix}.unpadded_vocab_size", 1, config["vocab_size"], default=None),
    }


def _rwkv7(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config |= {"hidden_act": "sqrelu", "head_dim": metadata.int(f"{prefix}.wkv.head_size", 1, MOST_WIDTH)}
    if "blk.0.time_mix_g1.weight" not in tensors:
        raise ModelError(f"{metadata.where} has an RWKV-7 without gates, which lmstate cannot run")


RWKV_7 = {
    **{f"time_mix_{name}": f"attn.{part}_proj" for part, name in RWKV_PROJECTIONS.items()},
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "time_mix_ln": "attn.g_norm",
    "channel_mix_key": "ffn.key",
    "channel_mix_value": "ffn.value",
}
RWKV_7_WHOLE = {
    **{f"time_mix_{part}{n}.weight": f"attn.{part}_lora.lora.{end}" for part in "wavg" for n, end in LORA.items()},
    **{f"time_mix_{name}.weight": f"attn.{name}" for name in ("k_k", "k_a", "r_k")},
    "time_mix_lerp_fused.weight": "attn.x_x",
    "channel_mix_lerp_k.weight": "ffn.x_k",
}
RWKV_7_OUTSIDE = {
    "token_embd.weight": "model.embeddings.weight",
    "output.weight": "lm_head.weight",
    **{f"token_embd_norm.{end}": f"model.layers.0.pre_norm.{end}" for end in ("weight", "bias")},
    **{f"output_norm.{end}": f"model.norm.{end}" for end in ("weight", "bias")},
}

DELTAS = {
    "qwen3next": Architecture(
        "qwen3_next", "Qwen3NextForCausalLM", QWEN, whole=QWEN_WHOLE, changed=QWEN_CHANGES, extra=_qwen_config
    ),
    "qwen35": Architecture(
        "qwen3_5_text", "Qwen3_5ForCausalLM", QWEN, whole=QWEN_WHOLE, changed=QWEN_CHANGES, tiled=QWEN3_5_TILED,
        extra=qwen3_5_config,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", QWEN, whole=QWEN_WHOLE, changed=QWEN_CHANGES, tiled=QWEN3_5_TILED,
        extra=qwen3_5_config,
    ),
    "inkling": Architecture(
        "inkling_text",
        "InklingForCausalLM",
        {
            **SPARSE,
            **MLP,
            **HEAD_NORMS,
            "attn_r": "self_attn.r_proj",
            **{f"shortconv_{part}": f"self_attn.{part}_sconv.conv1d" for part in "kv"},
            **{f"shortconv_{part}": f"{part}_sconv.conv1d" for part in ("attn", "mlp")},
            **{f"ffn_{part}_shexp": f"mlp.shared_experts.{{each}}.{part}_proj" for part in ("gate", "up", "down")},
        },
        whole={
            **CORRECTION,
            "attn_rel_proj.weight": "self_attn.rel_logits_proj.proj",
            "ffn_gscale.weight": "mlp.global_scale",
        },
        outside={**OUTSIDE, "token_embd_norm.weight": "model.embed_tokens.embed_norm.weight"},
        changed={"conv1d.weight": "convolution"},
        varied=True,
        extra=_inkling,
    ),
    "rwkv7": Architecture(
        "rwkv7", "RWKV7ForCausalLM", RWKV_7, whole=RWKV_7_WHOLE, outside=RWKV_7_OUTSIDE, eps="norm_eps", hybrid=True,
        extra=_rwkv7,
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
