"""Wide residual streams over delta rules in GGUF: Qwen4-Exp, GLM-5.3."""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    MLP,
    MOST_WIDTH,
    NEXTN,
    OUTSIDE,
    STANDARD,
    Architecture,
    HFConfig,
    Tensors,
)
from lmstate.checkpoints.gguf.architectures.chosen import INDEX, STREAMS, clamp, index_sizes
from lmstate.checkpoints.gguf.architectures.delta import (
    QWEN,
    QWEN3_5_TILED,
    QWEN_CHANGES,
    QWEN_WHOLE,
    qwen3_5_config,
)
from lmstate.checkpoints.gguf.architectures.latent import CONVOLUTIONS, DELTA, DELTA_WHOLE, LATENT
from lmstate.checkpoints.gguf.architectures.mamba import layers_with
from lmstate.checkpoints.gguf.architectures.moe import CORRECTION, SHARED, SPARSE, deepseek_experts
from lmstate.errors import ModelError

MIXED = {
    "norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up", "inject": "block_inject_weight",
}  # fmt: skip
POOLING = "self_attn.indexer.index_kpool_compress"
NGRAMS = {
    "ple_key": "ple.key_proj", "ple_value": "ple.value_proj", "ple_conv1d": "ple.conv1d",
    **{f"ple_norm_{part}": f"ple.norm_{part}" for part in ("key", "query", "conv")},
}  # fmt: skip


def _qwen4_exp(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    qwen3_5_config(metadata, prefix, config, tensors)
    layers = config["num_hidden_layers"]
    recurs = [f"blk.{layer}.ssm_a" in tensors for layer in range(layers)]
    ratios = metadata.ints(f"{prefix}.attention.compress_ratios", low=0)[:layers]
    rates = {rate for rate, recurrent in zip(ratios, recurs) if not recurrent}
    if len(ratios) < layers or len(rates) != 1 or 0 in rates:
        raise ModelError(
            f"{metadata.where} pools the index of its layers by {list(ratios)} tokens; expected one rate for each of "
            f"{layers} layers, the same in all that attend"
        )
    config |= {
        "layer_types": ["linear_attention" if recurrent else "full_attention" for recurrent in recurs],
        "hc_count": metadata.int(f"{prefix}.hyper_connection.count", 2, 64),
        "hc_lowrank": metadata.int(f"{prefix}.hyper_connection.low_rank", 1, MOST_WIDTH),
        "indexer_n_heads": metadata.int(f"{prefix}.attention.indexer.head_count", 1, MOST_WIDTH),
        "indexer_head_dim": metadata.int(f"{prefix}.attention.indexer.key_length", 1, MOST_WIDTH),
        "indexer_budget": metadata.int(f"{prefix}.attention.indexer.top_k", 1),
        "indexer_compress_ratio": rates.pop(),
        "ple_layer_ids": [],
    }
    if metadata.given(f"{prefix}.ple.layers"):
        config |= _ngrams(metadata, prefix, layers)


def _ngrams(metadata: Config, prefix: str, layers: int) -> HFConfig:
    """N-grams of one layer, with the numbers that hash them."""
    (layer,) = metadata.ints(f"{prefix}.ple.layers", 1, high=layers - 1)
    order = metadata.int(f"{prefix}.ple.ngram_size", 2, 64)
    each = metadata.int(f"{prefix}.ple.heads_per_ngram", 1, 1024)
    heads = each * (order - 1)
    sizes = metadata.ints(f"{prefix}.ple.head_vocab_sizes", heads, 1)
    offsets = metadata.ints(f"{prefix}.ple.head_offsets", heads)
    if any(offset != sum(sizes[:head]) for head, offset in enumerate(offsets)):
        raise ModelError(f"{metadata.where}: the rows of its n-grams' heads do not lie one after the other")
    return {
        "ple_layer_ids": [layer + 1],
        "ngram_size": order,
        "heads_per_ngram": each,
        "ple_conv_kernel_size": metadata.int(f"{prefix}.ple.conv_kernel", 1, 64),
        "ple_embed_dim": heads * metadata.int(f"{prefix}.embedding_length_per_layer_input", 1, MOST_WIDTH),
        "ple_head_vocab_sizes": list(sizes),
        "ple_layer_multipliers": list(metadata.ints(f"{prefix}.ple.layer_multipliers", order, 1, 2**63 - 1)),
        "eos_token_id": metadata.int(f"{prefix}.ple.eos_token_id"),
    }


def _glm5_next(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Attention without positions. The bound of gates is one for experts and dense layers."""
    if metadata.int(f"{prefix}.rope.dimension_count", 0, default=0):
        raise ModelError(f"{metadata.where} rotates a part of its heads, which no GLM-5.3 does")
    deepseek_experts(metadata, prefix, config, tensors)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    recurs, chooses = (set(layers_with(f"{name}.weight", tensors)) for name in ("ssm_beta", "indexer.attn_k"))
    config |= index_sizes(metadata, prefix) | {
        "layer_types": ["linear_attention" if layer in recurs else "full_attention" for layer in range(layers)],
        "indexer_types": ["full" if layer in chooses | recurs else "shared" for layer in range(layers)],
        "n_routed_experts": config["num_experts"],
        "num_key_value_heads": heads,
        "head_dim": None,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": metadata.int(f"{prefix}.attention.key_length_mla", 1, MOST_WIDTH),
        "v_head_dim": metadata.int(f"{prefix}.attention.value_length_mla", 1, MOST_WIDTH),
        "kv_lora_rank": metadata.int(f"{prefix}.attention.kv_lora_rank", 1, MOST_WIDTH),
        "q_lora_rank": metadata.int(f"{prefix}.attention.q_lora_rank", 1, MOST_WIDTH),
        "index_kpool": metadata.int(f"{prefix}.attention.indexer.kpool", 1, 2**16),
        "index_kpool_always_select_tail": metadata.bool(f"{prefix}.attention.indexer.kpool_select_tail", default=True),
        "linear_num_heads": heads,
        "linear_head_dim": metadata.int(f"{prefix}.kda.head_dim", 1, MOST_WIDTH),
        "linear_conv_kernel_dim": metadata.int(f"{prefix}.ssm.conv_kernel", 1, 256),
        "linear_lower_bound": metadata.float(f"{prefix}.kda.gate_lower_bound", high=0.0, default=None),
        "hc_mult": metadata.int(f"{prefix}.hyper_connection.count", 1, 64),
        "hc_eps": metadata.float(f"{prefix}.hyper_connection.epsilon", 0.0, 1.0),
        "hc_sinkhorn_iters": metadata.int(f"{prefix}.hyper_connection.sinkhorn_iterations", 1, 1000),
        "swiglu_limit": clamp(metadata, prefix),
    }


WIDE = {
    "glm5-next": Architecture(
        "glm5_next_text",
        "Glm5NextForCausalLM",
        {
            **STANDARD, **SPARSE, **MLP, **SHARED, **NEXTN, **LATENT, **DELTA, **INDEX,
            **{f"ssm_{ours}": f"self_attn.{ours}_proj" for ours in ("f_a", "f_b", "g_a", "g_b")},
        },
        extra=_glm5_next,
        whole={
            **CORRECTION,
            **DELTA_WHOLE,
            **STREAMS,
            **{f"indexer.kpool_{part}.weight": f"{POOLING}_{part}" for part in ("gate", "ape")},
        },
        changed={**CONVOLUTIONS, "A_log": "decay vector"},
        whole_rope=True,
        hybrid=True,
    ),
    "qwen4exp": Architecture(
        "qwen4_exp_text",
        "Qwen4ExpForCausalLM",
        {
            **QWEN,
            **NGRAMS,
            **{f"hc_attn_{ours}": f"attn_hyper_connection.{theirs}" for ours, theirs in MIXED.items()},
            **{f"hc_ffn_{ours}": f"mlp_hyper_connection.{theirs}" for ours, theirs in MIXED.items()},
            **{f"indexer.{part}_proj": f"self_attn.indexer.index_{part}_proj" for part in "qk"},
            **{f"indexer.{part}_norm": f"self_attn.indexer.{part}_layernorm" for part in "qk"},
            **{f"nextn.hc_head_{ours}": f"hyper_connection_mixer.{theirs}" for ours, theirs in MIXED.items()},
        },
        whole=QWEN_WHOLE,
        outside={
            **OUTSIDE,
            **{
                f"output_hc_{ours}.weight": f"model.hyper_connection_mixer.{theirs}.weight"
                for ours, theirs in MIXED.items()
            },
            "per_layer_token_embd.weight": "model.layers.{ngrams}.ple.ple_embedding.ngram_embedding.weight",
        },
        changed={
            **QWEN_CHANGES,
            ".hc_norm.weight": "one more",
            **{f".norm_{part}.weight": "one more" for part in ("key", "query", "conv")},
        },
        tiled=QWEN3_5_TILED,
        extra=_qwen4_exp,
    ),
}  # fmt: skip
