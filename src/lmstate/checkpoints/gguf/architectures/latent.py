"""Latent attention in GGUF beside DeepSeek's: Mistral 4, MiniCPM 3, PLM, and the delta rule's in two hybrids."""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    MLP,
    MOST_LAYERS,
    MOST_WIDTH,
    NEXTN,
    STANDARD,
    Architecture,
    Change,
    HFConfig,
    Tensors,
)
from lmstate.checkpoints.gguf.architectures.mamba import layers_with
from lmstate.checkpoints.gguf.architectures.moe import CORRECTION, SHARED, SPARSE, deepseek_experts
from lmstate.checkpoints.gguf.architectures.windowed import WINDOWS_AND_LATENTS, deepseek2

DEEPSEEK2 = WINDOWS_AND_LATENTS["deepseek2"]
LATENT = {
    f"attn_{ours}": f"self_attn.{theirs}"
    for ours, theirs in {
        "q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj", "kv_a_mqa": "kv_a_proj_with_mqa",
        "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj", "k_b": "k_b_proj", "v_b": "v_b_proj",
    }.items()
}  # fmt: skip
DELTA = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}
DELTA_WHOLE = {"ssm_a": "self_attn.A_log", "ssm_dt.bias": "self_attn.dt_bias"}
CONVOLUTIONS: dict[str, Change] = {"conv1d.weight": "convolution"}


def _mistral4(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    deepseek2(metadata, prefix, config, tensors)
    config.setdefault("rope_scaling", {"rope_type": "default"})  # and not what the published models have
    strength = metadata.float(f"{prefix}.attention.temperature_scale", 0.0, default=0.0)
    if strength:
        length = metadata.int(f"{prefix}.attention.temperature_length", 1, default=None)
        config["rope_scaling"]["llama_4_scaling_beta"] = strength
        if length:
            config["rope_scaling"].setdefault("original_max_position_embeddings", length)


def _minicpm3(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Files leave the scales out; those of the family are the published models'."""
    rope_dim = metadata.int(f"{prefix}.rope.dimension_count", 2, MOST_WIDTH)
    config.pop("partial_rotary_factor", None)
    config |= {
        "qk_nope_head_dim": config["head_dim"] - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": config["hidden_size"] // config["num_attention_heads"],
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": metadata.int(f"{prefix}.attention.kv_lora_rank", 1, MOST_WIDTH),
        "q_lora_rank": metadata.int(f"{prefix}.attention.q_lora_rank", 1, MOST_WIDTH, default=None),
        "head_dim": rope_dim,
    }


def _plm(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    deepseek2(metadata, prefix, config, tensors)
    config |= {"hidden_act": "relu2", "mlp_gated": False}


def _delta(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Sizes of latent attention, and of the delta rule in the layers without any; heads that draft count as blocks."""
    deepseek_experts(metadata, prefix, config, tensors)
    layers = range(config["num_hidden_layers"])
    recurs = set(layers_with("ssm_beta.weight", tensors))
    rope_dim = metadata.int(f"{prefix}.rope.dimension_count", 2, MOST_WIDTH)
    key, value = (metadata.int(f"{prefix}.attention.{part}_length_mla", 1, MOST_WIDTH) for part in ("key", "value"))
    config.pop("partial_rotary_factor", None)
    config |= {
        "layer_types": ["linear_attention" if layer in recurs else "full_attention" for layer in layers],
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope_dim,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
        "kv_lora_rank": metadata.int(f"{prefix}.attention.kv_lora_rank", 1, MOST_WIDTH),
        "q_lora_rank": metadata.int(f"{prefix}.attention.q_lora_rank", 1, MOST_WIDTH, default=None),
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": metadata.int(f"{prefix}.kda.head_dim", 1, MOST_WIDTH),
        "linear_conv_kernel_dim": metadata.int(f"{prefix}.ssm.conv_kernel", 1, 256),
        "first_k_dense_replace": metadata.int(f"{prefix}.leading_dense_block_count", 0, MOST_LAYERS, default=0),
    }


def _kimi_linear(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    _delta(metadata, prefix, config, tensors)
    config |= {
        "num_experts_per_token": config["num_experts_per_tok"],
        "num_shared_experts": config["n_shared_experts"],
        "num_expert_group": config["n_group"],
        "moe_renormalize": metadata.bool(f"{prefix}.expert_weights_norm", default=True),
    }


def _bailing(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    _delta(metadata, prefix, config, tensors)
    config |= {
        "kda_safe_gate": metadata.bool(f"{prefix}.kda.safe_gate", default=True),
        "kda_lower_bound": metadata.float(f"{prefix}.kda.gate_lower_bound", -1e6, 0.0),
    }


LATENTS = {
    "bailingmoe3": Architecture(
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        {
            **SPARSE, **MLP, **SHARED, **NEXTN, **LATENT, **DELTA, "attn_gate": "self_attn.g_proj",
            "ssm_f_a": "self_attn.f_proj", "ssm_g_a": "self_attn.g_proj", "layer_output_norm": "shared_head.norm",
        },
        extra=_bailing,
        whole={**CORRECTION, **DELTA_WHOLE},
        changed={**CONVOLUTIONS, "A_log": "rate"},
        hybrid=True,
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        "KimiLinearForCausalLM",
        {
            **STANDARD, **LATENT, **DELTA,
            **{f"ssm_{ours}": f"self_attn.{ours}_proj" for ours in ("f_a", "f_b", "g_a", "g_b")},
            **{f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
        },
        extra=_kimi_linear,
        whole={"exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias", **DELTA_WHOLE},
        changed={**CONVOLUTIONS, "A_log": "decay vector"},
        hybrid=True,
    ),
    "minicpm3": Architecture("minicpm3", "MiniCPM3ForCausalLM", {**STANDARD, **LATENT}, extra=_minicpm3),
    "mistral4": Architecture(
        "mistral4",
        "Mistral4ForCausalLM",
        DEEPSEEK2.layer,
        extra=_mistral4,
        whole={**DEEPSEEK2.whole, "ffn_gate_up_exps.weight": "mlp.experts.{expert}.gate_up_proj.weight"},
    ),
    "plm": Architecture("deepseek_v2", "DeepseekV2ForCausalLM", {**STANDARD, **LATENT}, extra=_plm),
}  # fmt: skip
