"""Attention to what an index chooses in GGUF: DeepSeek-V3.2 and V4, GLM-5, dots.3 Note, Hunyuan 4, MiniMax-M3."""

from __future__ import annotations

from functools import partial

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    HEAD_NORMS,
    MLP,
    MOST_LAYERS,
    MOST_WIDTH,
    NEXTN,
    OUTSIDE,
    Architecture,
    HFConfig,
    Tensors,
    layer_kinds,
)
from lmstate.checkpoints.gguf.architectures.dense import ONE_MORE
from lmstate.checkpoints.gguf.architectures.latent import DEEPSEEK2
from lmstate.checkpoints.gguf.architectures.mamba import layers_with
from lmstate.checkpoints.gguf.architectures.moe import CORRECTION, SHARED, SPARSE, experts
from lmstate.checkpoints.gguf.architectures.windowed import deepseek2
from lmstate.errors import ModelError

FULL, INDEXED, SLIDING = "full_attention", "indexed_attention", "sliding_attention"
UNCLAMPED = 1e30
"""A bound of gates that no activation meets."""
INDEX = {
    f"indexer.{ours}": f"self_attn.indexer.{theirs}"
    for ours, theirs in {"k_norm": "k_norm", "proj": "weights_proj", "attn_k": "wk", "attn_q_b": "wq_b"}.items()
}
STREAMS = {
    **{f"hc_{part}_{each}.weight": f"{part}_hc.{each}" for part in ("attn", "ffn") for each in ("fn", "base", "scale")},
    "attn_sinks.weight": "self_attn.sinks",
}
OUTSIDE_STREAMS = {
    **OUTSIDE,
    **{f"output_hc_{each}.weight": f"model.hc_head.hc_{each}" for each in ("fn", "base", "scale")},
}


def index_sizes(metadata: Config, prefix: str) -> HFConfig:
    """Sizes of an index."""
    return {
        "index_n_heads": metadata.int(f"{prefix}.attention.indexer.head_count", 1, MOST_WIDTH),
        "index_head_dim": metadata.int(f"{prefix}.attention.indexer.key_length", 1, MOST_WIDTH),
        "index_topk": metadata.int(f"{prefix}.attention.indexer.top_k", 1),
    }


def _without_drafts(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> HFConfig:
    """Count of the layers without those that draft; most files count these as blocks, some leave them out."""
    blocks = config["num_hidden_layers"]
    drafts, last = metadata.int(f"{prefix}.nextn_predict_layers", 0, blocks - 1, default=0), f"blk.{blocks - 1}."
    if f"{last}attn_norm.weight" in tensors and not any(name.startswith(f"{last}nextn.") for name in tensors):
        drafts = 0
    return {"num_hidden_layers": blocks - drafts, "num_nextn_predict_layers": drafts}


def clamp(metadata: Config, prefix: str) -> float:
    """The bound of experts' gates, which is one for all layers."""
    bounds = metadata.floats(f"{prefix}.swiglu_clamp_exp", low=0.0, default=())
    if len(set(bounds)) > 1:
        raise ModelError(f"{metadata.where} bounds the gates of its layers by {sorted(set(bounds))}; one is expected")
    return bounds[0] if bounds and bounds[0] else UNCLAMPED


def _width(part: str, tensors: Tensors, default: int) -> int:
    """Width of a feed-forward part, from the first layer that has it."""
    found = layers_with(f"{part}.weight", tensors)
    return tensors[f"blk.{found[0]}.{part}.weight"].shape[0] if found else default


def _latents(
    metadata: Config, prefix: str, config: HFConfig, tensors: Tensors, *, model_type: str, class_name: str
) -> None:
    """Latent attention under an index; layers without one go by an earlier layer's choice."""
    deepseek2(metadata, prefix, config, tensors)
    config |= _without_drafts(metadata, prefix, config, tensors) | index_sizes(metadata, prefix)
    chooses = set(layers_with("indexer.attn_k.weight", tensors))
    config |= {
        "model_type": model_type,
        "architectures": [class_name],
        "indexer_types": ["full" if layer in chooses else "shared" for layer in range(config["num_hidden_layers"])],
    }


def _hy_v4(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    _latents(metadata, prefix, config, tensors, model_type="hy_v4", class_name="HYV4ForCausalLM")
    config |= {
        "hc_mult": metadata.int(f"{prefix}.hyper_connection.count", 1, 64),
        "hc_eps": metadata.float(f"{prefix}.hyper_connection.epsilon", 0.0, 1.0),
        "hc_magnitude": metadata.float(f"{prefix}.hyper_connection.magnitude", 0.0, 1e6),
        "swiglu_limit": clamp(metadata, prefix),
    }


def _dots3_note(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Layers with a window have heads and latents of their own sizes; the scale of latents is in their norms."""
    blocks, name = config["num_hidden_layers"], f"{prefix}.attention.head_count"
    _latents(metadata, prefix, config, tensors, model_type="dots3_note_text", class_name="Dots3NoteTextForCausalLM")
    layers = config["num_hidden_layers"]
    kinds = layer_kinds(metadata, prefix, layers, blocks) or [FULL] * layers
    heads = metadata.ints(name, blocks, 1, MOST_WIDTH) if isinstance(metadata.get(name), list) else ()
    heads = heads or (config["num_attention_heads"],) * blocks
    near, far = ([count for count, kind in zip(heads, kinds) if kind == of] for of in (SLIDING, FULL))
    shared = _width("ffn_gate_shexp", tensors, config["moe_intermediate_size"] * config["n_shared_experts"])
    rope_dim, theta = config["qk_rope_head_dim"], config["rope_theta"]
    local = metadata.float(f"{prefix}.rope.freq_base_swa", 1.0, 1e18, default=theta)
    config |= {
        "layer_types": kinds,
        "use_dsa": True,
        "num_attention_heads": (far or near)[0],
        "num_key_value_heads": (far or near)[0],
        "sliding_window": metadata.int(f"{prefix}.attention.sliding_window", 1),
        "shared_experts_intermediate_size": shared // max(config["n_shared_experts"], 1),
        "apply_mla_qkv_lora_rescale": False,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base}
            for kind, base in ((FULL, theta), (INDEXED, theta), (SLIDING, local))
        },
    }
    if near:
        width = metadata.int(f"{prefix}.attention.key_length_mla_swa", rope_dim + 1, MOST_WIDTH)
        config |= {
            "swa_num_attention_heads": near[0],
            "swa_head_dim": width,
            "swa_qk_nope_head_dim": width - rope_dim,
            "swa_qk_rope_head_dim": rope_dim,
            "swa_v_head_dim": metadata.int(f"{prefix}.attention.value_length_mla_swa", 1, MOST_WIDTH),
            "swa_q_lora_rank": config["q_lora_rank"],
            "swa_kv_lora_rank": metadata.int(f"{prefix}.attention.kv_lora_rank_swa", 1, MOST_WIDTH),
        }


def _minimax_m3(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    layers, indexed = range(config["num_hidden_layers"]), set(layers_with("indexer.q_proj.weight", tensors))
    sparse = set(layers_with("ffn_gate_inp.weight", tensors))
    experts(metadata, prefix, config, tensors)
    dense = config["intermediate_size"]
    config |= {
        "intermediate_size": config["moe_intermediate_size"],
        "dense_intermediate_size": _width("ffn_gate", tensors, dense),
        "shared_intermediate_size": _width("ffn_gate_shexp", tensors, dense),
        "num_local_experts": config["num_experts"],
        "routed_scaling_factor": metadata.float(f"{prefix}.expert_weights_scale", 0.0, 1e6, default=1.0),
        "layer_types": ["minimax_m3_sparse" if layer in indexed else FULL for layer in layers],
        "mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in layers],
    }
    if indexed:
        config |= {
            **index_sizes(metadata, prefix),
            "index_topk_blocks": metadata.int(f"{prefix}.attention.indexer.top_k", 1),
            "index_block_size": metadata.int(f"{prefix}.attention.indexer.block_size", 1),
            "index_local_blocks": metadata.int(f"{prefix}.attention.indexer.local_blocks", 0, default=1),
        }


def _deepseek4(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config |= _without_drafts(metadata, prefix, config, tensors)
    experts(metadata, prefix, config, tensors)
    config |= {
        **index_sizes(metadata, prefix),
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": metadata.int(f"{prefix}.expert_shared_count", 1, 64, default=1),
        "routed_scaling_factor": metadata.float(f"{prefix}.expert_weights_scale", 0.0, 1e6, default=1.0),
        "num_hash_layers": metadata.int(f"{prefix}.hash_layer_count", 0, MOST_LAYERS, default=0),
        "swiglu_limit": clamp(metadata, prefix),
        "q_lora_rank": metadata.int(f"{prefix}.attention.q_lora_rank", 1, MOST_WIDTH),
        "o_lora_rank": metadata.int(f"{prefix}.attention.output_lora_rank", 1, MOST_WIDTH),
        "o_groups": metadata.int(f"{prefix}.attention.output_group_count", 1, MOST_WIDTH),
        "compress_ratios": list(metadata.ints(f"{prefix}.attention.compress_ratios")),
        "compress_rope_theta": metadata.float(f"{prefix}.attention.compress_rope_freq_base", 1.0, 1e18),
        "sliding_window": metadata.int(f"{prefix}.attention.sliding_window", 1),
        "hc_mult": metadata.int(f"{prefix}.hyper_connection.count", 1, 64),
        "hc_eps": metadata.float(f"{prefix}.hyper_connection.epsilon", 0.0, 1.0),
        "hc_sinkhorn_iters": metadata.int(f"{prefix}.hyper_connection.sinkhorn_iterations", 1, 1000),
    }


DEEPSEEK32 = {**DEEPSEEK2.layer, **NEXTN, **INDEX}
COMPRESSOR = {"kv": "kv_proj", "gate": "gate_proj", "norm": "kv_norm"}
CHOSEN = {
    "deepseek32": Architecture(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        DEEPSEEK32,
        extra=partial(_latents, model_type="deepseek_v32", class_name="DeepseekV32ForCausalLM"),
        whole=DEEPSEEK2.whole,
    ),
    "deepseek4": Architecture(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        {
            **SPARSE,
            **SHARED,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_norm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv": "self_attn.kv_proj",
            "attn_kv_a_norm": "self_attn.kv_norm",
            "attn_output_a": "self_attn.o_a_proj",
            "attn_output_b": "self_attn.o_b_proj",
            "indexer.proj": "self_attn.compressor.indexer.scorer.weights_proj",
            "indexer.attn_q_b": "self_attn.compressor.indexer.q_b_proj",
            **{f"attn_compressor_{part}": f"self_attn.compressor.{name}" for part, name in COMPRESSOR.items()},
            **{
                f"indexer_compressor_{part}": f"self_attn.compressor.indexer.{name}"
                for part, name in COMPRESSOR.items()
            },
        },
        extra=_deepseek4,
        whole={
            **STREAMS,
            **CORRECTION,
            "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
            "attn_compressor_ape.weight": "self_attn.compressor.position_bias",
            "indexer_compressor_ape.weight": "self_attn.compressor.indexer.position_bias",
        },
        outside=OUTSIDE_STREAMS,
    ),
    "dots3note": Architecture(
        "dots3_note_text",
        "Dots3NoteTextForCausalLM",
        {**DEEPSEEK32, "attn_k_norm": "self_attn.k_rope_only_layernorm", "attn_gate": "self_attn.g_proj"},
        extra=_dots3_note,
        whole=DEEPSEEK2.whole,
        varied=True,
    ),
    "glm-dsa": Architecture(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        DEEPSEEK32,
        extra=partial(_latents, model_type="glm_moe_dsa", class_name="GlmMoeDsaForCausalLM"),
        whole=DEEPSEEK2.whole,
    ),
    "hy_v4": Architecture(
        "hy_v4",
        "HYV4ForCausalLM",
        {**DEEPSEEK2.layer, **INDEX, "attn_gate": "self_attn.gate_proj"},
        extra=_hy_v4,
        whole={**DEEPSEEK2.whole, **STREAMS},
        outside=OUTSIDE_STREAMS,
    ),
    "minimax-m3": Architecture(
        "minimax_m3_vl_text",
        "MiniMaxM3SparseForCausalLM",
        {
            **SPARSE,
            **MLP,
            **SHARED,
            **HEAD_NORMS,
            **{f"indexer.{part}": f"self_attn.indexer.{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")},
        },
        extra=_minimax_m3,
        whole=CORRECTION,
        changed=ONE_MORE,
    ),
}
