"""Mixtures of experts in GGUF beside the usual ones: with windows, chunks, sinks, linear attention or clipped keys."""

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
    STANDARD,
    Architecture,
    HFConfig,
    Tensors,
    layer_kinds,
)
from lmstate.checkpoints.gguf.architectures.dense import BIASED_NORM, ONE_MORE
from lmstate.checkpoints.gguf.architectures.moe import CORRECTION, SPARSE, experts, shared
from lmstate.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA4_CHUNK = 8192
"""Chunks that Llama 4 attends inside, which files do not give."""


def _rope_of_windows(metadata: Config, prefix: str, config: HFConfig) -> None:
    """Config of ropes that are stretched, or turn a part of a head, where a layer sees everything."""
    theta = config["rope_theta"]
    full = {**(config.pop("rope_scaling", None) or {"rope_type": "default"}), "rope_theta": theta}
    near = {
        "rope_type": "default",
        "rope_theta": metadata.float(f"{prefix}.rope.freq_base_swa", 1e-3, 1e18, default=theta),
    }
    rotated = config.pop("partial_rotary_factor")
    slides = metadata.int(f"{prefix}.rope.dimension_count_swa", 1, MOST_WIDTH, default=None)
    config["rope_parameters"] = {
        FULL: {**full, "partial_rotary_factor": rotated},
        SLIDING: {**near, "partial_rotary_factor": slides / config["head_dim"] if slides else rotated},
    }


def windows(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors, *, full_first: bool = False) -> None:
    """Windows and their layers; without a list of those, three of four layers have one."""
    layers = config["num_hidden_layers"]
    size = metadata.int(f"{prefix}.attention.sliding_window", 0, default=0)
    config["sliding_window"] = size or None
    every = metadata.get(f"{prefix}.attention.sliding_window_pattern", 4)
    if isinstance(every, int) and every:
        full = 0 if full_first else every - 1
        kinds = [FULL if index % every == full else SLIDING for index in range(layers)]
    else:
        kinds = layer_kinds(metadata, prefix, layers, metadata.int(f"{prefix}.block_count")) or [FULL] * layers
    config["layer_types"] = kinds if size else [FULL] * layers


def _llama4(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    dense, count = config["intermediate_size"], metadata.int(f"{prefix}.expert_count", 1, 4096)
    chunk = metadata.int(f"{prefix}.attention.sliding_window", 0, default=LLAMA4_CHUNK)
    experts(metadata, prefix, config, tensors)
    config |= {
        "intermediate_size_mlp": dense,
        "intermediate_size": config["moe_intermediate_size"],
        "num_local_experts": count,
        "interleave_moe_layer_step": metadata.int(f"{prefix}.interleave_moe_layer_step", 1, MOST_LAYERS),
        "attention_chunk_size": chunk or None,
        "no_rope_layer_interval": 4 if chunk else MOST_LAYERS + 1,
        "use_qk_norm": count != 128,  # Maverick has none, which is how llama.cpp tells
    }


def _cohere2_moe(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Heads for multi-token prediction count as blocks. Shared experts are averaged with the routed ones."""
    blocks, dense = config["num_hidden_layers"], config["intermediate_size"]
    drafts = metadata.int(f"{prefix}.nextn_predict_layers", 0, blocks - 1, default=0)
    layers = config["num_hidden_layers"] = blocks - drafts
    experts(metadata, prefix, config, tensors)
    windows(metadata, prefix, config, tensors)
    config |= {
        "num_nextn_predict_layers": drafts,
        "intermediate_size": config["moe_intermediate_size"],
        "prefix_dense_intermediate_size": dense,
        "num_shared_experts": metadata.int(f"{prefix}.expert_shared_count", 0, 1024, default=0),
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "dense" for layer in range(layers)
        ],
        "expert_selection_fn": "softmax"
        if metadata.int(f"{prefix}.expert_gating_func", 0, 16, default=2) == 1
        else "sigmoid",
        "norm_topk_prob": metadata.bool(f"{prefix}.expert_weights_norm", default=False),
        "logit_scale": metadata.float(f"{prefix}.logit_scale", default=0.0625),
    }


def _granite_swa(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Granite's scales, windows and sinks; the file says of each layer whether its heads rotate."""
    layers, theta = config["num_hidden_layers"], config["rope_theta"]
    windows(metadata, prefix, config, tensors)
    rotates = metadata.get(f"{prefix}.attention.rope_pattern", [True] * layers)
    if not isinstance(rotates, list) or len(rotates) != layers:
        raise ModelError(f"{metadata.where} must have {layers} flags in '{prefix}.attention.rope_pattern'")
    config |= {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "layer_rope_theta": [theta if each else 0.0 for each in rotates],
        "attention_multiplier": metadata.float(f"{prefix}.attention.scale", default=0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": metadata.float(f"{prefix}.embedding_scale", default=1.0),
        "residual_multiplier": metadata.float(f"{prefix}.residual_scale", default=1.0),
        "logits_scaling": metadata.float(f"{prefix}.logit_scale", default=1.0),
    }
    if count := metadata.int(f"{prefix}.expert_count", 0, 4096, default=0):
        shared = metadata.int(f"{prefix}.expert_shared_feed_forward_length", 0, MOST_WIDTH, default=0)
        config |= {
            "model_type": "granitemoe_swa",
            "architectures": ["GraniteMoeSWAForCausalLM"],
            "num_experts": count,
            "num_local_experts": count,
            "num_experts_per_tok": metadata.int(f"{prefix}.expert_used_count", 1, count),
            "shared_intermediate_size": shared,
        }


def _dbrx(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    config |= {
        "attn_config": {
            "kv_n_heads": config["num_key_value_heads"],
            "rope_theta": config["rope_theta"],
            "clip_qkv": metadata.float(f"{prefix}.attention.clamp_kqv", 0.0, default=None),
        },
        "ffn_config": {
            "ffn_hidden_size": config["intermediate_size"],
            "moe_num_experts": config["num_experts"],
            "moe_top_k": config["num_experts_per_tok"],
            "moe_normalize_expert_weights": 1.0,
        },
    }


def _phimoe(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    config |= {
        "num_local_experts": config["num_experts"],
        "lm_head_bias": "output.bias" in tensors,
        "sliding_window": metadata.int(f"{prefix}.attention.sliding_window", 0, default=0) or None,
    }
    if (scaling := config.get("rope_scaling")) is not None and scaling["rope_type"] == "longrope":
        scaling |= {f"{part}_mscale": scaling["attention_factor"] for part in ("short", "long")}


def _laguna(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    layers = config["num_hidden_layers"]
    experts(metadata, prefix, config, tensors)
    windows(metadata, prefix, config, tensors, full_first=True)
    _rope_of_windows(metadata, prefix, config)
    name = f"{prefix}.attention.head_count"
    heads = metadata.ints(name, layers, 1, MOST_WIDTH) if isinstance(metadata.get(name), list) else ()
    heads = heads or (config["num_attention_heads"],) * layers
    gate = tensors.get("blk.0.attn_gate.weight")
    config |= {
        "num_attention_heads_per_layer": list(heads),
        "num_attention_heads": heads[0],
        "gating": "per-element" if gate is not None and gate.shape[0] != heads[0] else "per-head",
        "first_k_dense_replace": metadata.int(f"{prefix}.leading_dense_block_count", 0, MOST_LAYERS, default=0),
        "moe_routed_scaling_factor": metadata.float(f"{prefix}.expert_weights_scale", 0.0, 1e6, default=1.0),
        "shared_expert_intermediate_size": metadata.int(f"{prefix}.expert_shared_feed_forward_length", 1, MOST_WIDTH),
    }


def _mellum(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    windows(metadata, prefix, config, tensors)
    _rope_of_windows(metadata, prefix, config)
    config["first_k_dense_replace"] = 0


def _mimo2(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Heads for multi-token prediction count as blocks; they are left out."""
    blocks = config["num_hidden_layers"]
    drafts = metadata.int(f"{prefix}.nextn_predict_layers", 0, blocks - 1, default=0)
    layers = blocks - drafts
    experts(metadata, prefix, config, tensors)
    name = f"{prefix}.attention.sliding_window_pattern"
    flags = metadata.get(name)
    if not isinstance(flags, list) or len(flags) != blocks or not all(flag in (0, 1) for flag in flags):
        raise ModelError(f"{metadata.where} must have {blocks} flags in {name!r}, one a layer; it is damaged")
    name = f"{prefix}.attention.head_count_kv"
    heads = metadata.ints(name, blocks, 1, MOST_WIDTH) if isinstance(metadata.get(name), list) else ()
    heads = heads or (config["num_key_value_heads"],) * blocks
    near = [count for count, slides in zip(heads, flags) if slides]
    far = [count for count, slides in zip(heads, flags) if not slides]
    config |= {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": drafts,
        "num_key_value_heads": (far or near)[0],
        "swa_num_key_value_heads": (near or far)[0],
        "layer_types": [SLIDING if slides else FULL for slides in flags[:layers]],
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "dense" for layer in range(layers)
        ],
        "sliding_window": metadata.int(f"{prefix}.attention.sliding_window", 1),
        "v_head_dim": metadata.int(f"{prefix}.attention.value_length", 1, config["head_dim"]),
        "attention_value_scale": metadata.float(f"{prefix}.attention.value_scale", default=None),
        "routed_scaling_factor": metadata.float(f"{prefix}.expert_weights_scale", 0.0, 1e6, default=1.0),
        "norm_topk_prob": True,
    }
    _rope_of_windows(metadata, prefix, config)


def _step35(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """More heads where there is a window; half of each head turns where there is none, as llama.cpp fixes it."""
    blocks = config["num_hidden_layers"]
    drafts = metadata.int(f"{prefix}.nextn_predict_layers", 0, blocks - 1, default=0)
    layers, head_dim = blocks - drafts, config["head_dim"]
    experts(metadata, prefix, config, tensors)
    kinds = layer_kinds(metadata, prefix, layers, blocks) or [FULL] * layers
    name = f"{prefix}.attention.head_count"
    heads = metadata.ints(name, blocks, 1, MOST_WIDTH) if isinstance(metadata.get(name), list) else ()
    heads = heads or (config["num_attention_heads"],) * blocks
    near, far = ([count for count, kind in zip(heads, kinds) if kind == of] for of in (SLIDING, FULL))
    full = config.pop("rope_scaling", None) or {"rope_type": "default"}
    for part in ("long_factor", "short_factor"):  # for a whole head, of which half turns
        if part in full:
            full[part] = full[part][: head_dim // 4]
    theta = config["rope_theta"]
    local = metadata.float(f"{prefix}.rope.freq_base_swa", 1e-3, 1e18, default=theta)
    config.pop("partial_rotary_factor")
    config |= {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_attention_heads": (far or near)[0],
        "num_sliding_attention_heads": (near or far)[0],
        "sliding_window": metadata.int(f"{prefix}.attention.sliding_window", 1),
        "rope_parameters": {
            FULL: {**full, "rope_theta": theta, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": local, "partial_rotary_factor": 1.0},
        },
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "dense" for layer in range(layers)
        ],
        "share_expert_dim": metadata.int(f"{prefix}.expert_shared_feed_forward_length", 1, MOST_WIDTH),
        "moe_router_scaling_factor": metadata.float(f"{prefix}.expert_weights_scale", 0.0, 1e6, default=1.0),
        "swiglu_limits": metadata.get(f"{prefix}.swiglu_clamp_exp"),
        "swiglu_limits_shared": metadata.get(f"{prefix}.swiglu_clamp_shexp"),
    }


def _minimax_01(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    experts(metadata, prefix, config, tensors)
    alpha = metadata.float(f"{prefix}.residual_scale")
    parts = ("full_attn", "linear_attn", "mlp")
    config |= {f"{part}_alpha_factor": alpha for part in parts} | {f"{part}_beta_factor": 1.0 for part in parts}
    config["layer_types"] = [
        "linear_attention" if f"blk.{layer}.attn_qkv.weight" in tensors else FULL
        for layer in range(config["num_hidden_layers"])
    ]


SPARSER = {
    "cohere2moe": Architecture(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        {**SPARSE, **MLP, **NEXTN, **shared("mlp.shared_experts")},
        extra=_cohere2_moe,
        eps="layer_norm_eps",
        either_norm=True,
    ),
    "granite_swa": Architecture(
        "granite_swa",
        "GraniteSWAForCausalLM",
        {
            **STANDARD,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            **{
                f"ffn_{part}_exps": f"block_sparse_moe.experts.{{expert}}.{part}_proj"
                for part in ("gate", "up", "down")
            },
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        paired=True,
        extra=_granite_swa,
        also=("granitemoe_swa",),
        whole={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "dbrx": Architecture(
        "dbrx",
        "DbrxForCausalLM",
        {
            "attn_norm": "norm_attn_norm.norm_1",
            "attn_output_norm": "norm_attn_norm.norm_2",
            "attn_qkv": "norm_attn_norm.attn.Wqkv",
            "attn_output": "norm_attn_norm.attn.out_proj",
            "ffn_gate_inp": "ffn.router.layer",
            **{f"ffn_{part}_exps": f"ffn.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
        },
        extra=_dbrx,
        outside={
            "token_embd.weight": "transformer.wte.weight",
            "output_norm.weight": "transformer.norm_f.weight",
            "output.weight": "lm_head.weight",
        },
        layers="transformer.blocks",
        eps="layer_norm_eps",
    ),
    "laguna": Architecture(
        "laguna",
        "LagunaForCausalLM",
        {**SPARSE, **MLP, **HEAD_NORMS, **shared("mlp.shared_expert"), "attn_gate": "self_attn.g_proj"},
        extra=_laguna,
        whole=CORRECTION,
        varied=True,
    ),
    "llama4": Architecture(
        "llama4_text",
        "Llama4ForCausalLM",
        {
            **ATTENTION,
            **PRE_NORMS,
            **{name: inside.replace("mlp", "feed_forward") for name, inside in {**MLP, **EXPERTS}.items()},
            **shared("feed_forward.shared_expert"),
            "ffn_gate_inp": "feed_forward.router",
        },
        extra=_llama4,
    ),
    "mellum": Architecture("mellum", "MellumForCausalLM", {**SPARSE, **HEAD_NORMS}, extra=_mellum),
    "mimo2": Architecture(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        {**SPARSE, **MLP, **NEXTN, "attn_qkv": "self_attn.qkv_proj"},
        extra=_mimo2,
        whole={**CORRECTION, "attn_sinks.weight": "self_attn.sinks"},
        varied=True,
    ),
    "minimax-01": Architecture(
        "minimax",
        "MiniMaxForCausalLM",
        {
            **STANDARD,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_gate": "self_attn.output_gate",
            "attn_norm_2": "self_attn.norm",
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
        },
        extra=_minimax_01,
    ),
    "step35": Architecture(
        "step3p5",
        "Step3p7ForConditionalGeneration",
        {**SPARSE, **MLP, **HEAD_NORMS, **NEXTN, **shared("mlp.shared_experts"), "attn_gate": "self_attn.g_proj"},
        extra=_step35,
        whole=CORRECTION,
        changed=ONE_MORE,
        varied=True,
    ),
    "phimoe": Architecture(
        "phimoe",
        "PhiMoEForCausalLM",
        {
            **ATTENTION,
            **PRE_NORMS,
            **EXPERTS,
            "attn_qkv": "self_attn.{qkv}_proj",
            "ffn_gate_inp": "mlp.router",
        },
        extra=_phimoe,
        outside={**BIASED_NORM, "output.bias": "lm_head.bias"},
    ),
}
