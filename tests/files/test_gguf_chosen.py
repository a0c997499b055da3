"""Models in GGUF whose attention an index chooses for: their logits are those of transformers on the original."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.files.test_gguf_attention import loaded, same
from tests.zoo import auto, randomize
from tests.zoo.experts import CASES as EXPERTS
from tests.zoo.latent import CASES as LATENTS
from tests.zoo.latent import _v4

OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    **{f"model.hc_head.hc_{part}": f"output_hc_{part}" for part in ("fn", "base", "scale")},
}
INSIDE = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"{part}_hc.{each}": f"hc_{part}_{each}" for part in ("attn", "ffn") for each in ("fn", "base", "scale")},
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks", "self_attn.gate_proj": "attn_gate", "self_attn.g_proj": "attn_gate",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_rope_only_layernorm": "attn_k_norm",
    "self_attn.indexer.wk": "indexer.attn_k", "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.weights_proj": "indexer.proj",
    **{f"self_attn.indexer.{part}": f"indexer.{part}" for part in ("k_norm", "q_norm", "q_proj", "k_proj")},
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp", "mlp.gate.tid2eid": "ffn_gate_tid2eid",
    # DeepSeek-V4
    "self_attn.q_a_norm": "attn_q_a_norm", "self_attn.kv_proj": "attn_kv", "self_attn.kv_norm": "attn_kv_a_norm",
    "self_attn.o_a_proj": "attn_output_a", "self_attn.o_b_proj": "attn_output_b",
    "self_attn.compressor.indexer.q_b_proj": "indexer.attn_q_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "indexer.proj",
    **{
        f"self_attn.compressor.{inside}{name}": f"{ours}_compressor_{part}"
        for inside, ours in (("", "attn"), ("indexer.", "indexer"))
        for name, part in (("kv_proj", "kv"), ("gate_proj", "gate"), ("kv_norm", "norm"), ("position_bias", "ape"))
    },
}  # fmt: skip


def changed(arch: str, config: Any, layer: int, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor as the converter writes it, under its name inside a block, or the model's."""
    slides = arch == "dots3note" and config.layer_types[layer] == "sliding_attention"
    part = config.per_layer_config[layer] if slides else config
    if name.endswith("e_score_correction_bias"):
        yield "exp_probs_b.bias", tensor
    elif name == "mlp.experts.gate_up_proj":
        yield from ((f"ffn_{half}_exps.weight", each) for half, each in zip(("gate", "up"), tensor.chunk(2, 1)))
    elif name == "mlp.experts.down_proj":
        yield "ffn_down_exps.weight", tensor
    elif name.endswith("gate_up_proj.weight"):  # MiniMax-M3's other parts
        stem = name.removesuffix("gate_up_proj.weight")
        yield from ((f"{stem}{half}_proj.weight", each) for half, each in zip(("gate", "up"), tensor.chunk(2, 0)))
    elif name == "self_attn.kv_b_proj.weight":
        sizes = [part.qk_nope_head_dim, part.v_head_dim]
        keys, values = tensor.view(part.num_attention_heads, sum(sizes), -1).split(sizes, dim=1)
        yield from (("attn_k_b.weight", keys.mT), ("attn_v_b.weight", values))
    elif arch == "minimax-m3" and name.endswith("norm.weight"):
        yield name, tensor + 1
    elif arch == "dots3note" and re.search(r"\.(q|kv)_a_layernorm", name):
        yield name, tensor * (config.hidden_size / len(tensor)) ** 0.5
    else:
        yield name, tensor


def converted(arch: str, theirs: Any) -> dict[str, Any]:
    config, out = theirs.config, {}
    for full, tensor in theirs.state_dict().items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", full)
        layer = int(match[1]) if match else 0
        for name, value in changed(arch, config, layer, match[2] if match else full, tensor):
            stem, _, ending = name.rpartition(".")
            if ending not in ("weight", "bias"):
                stem, ending = name, "weight"
            known = INSIDE.get(stem, stem) if match else OUTSIDE[stem]
            out[f"{f'blk.{layer}.' if match else ''}{known}.{ending}"] = value.detach().numpy()
    return {
        name: np.ascontiguousarray(each.astype(np.int32 if "tid2eid" in name else np.float32))
        for name, each in out.items()
    }


def latents(config: Any, **more: Any) -> dict[str, Any]:
    """Keys of DeepSeek's latent attention and experts."""
    rope, latent = config.qk_rope_head_dim, config.kv_lora_rank
    return {
        "attention.head_count_kv": 1, "attention.key_length": latent + rope, "attention.value_length": latent,
        "attention.key_length_mla": config.qk_nope_head_dim + rope, "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": latent, "attention.q_lora_rank": config.q_lora_rank, "rope.dimension_count": rope,
        "leading_dense_block_count": 1, "expert_gating_func": 2, "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor, "expert_weights_norm": True,
        "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group,
        **index(config), **more,
    }  # fmt: skip


def index(config: Any) -> dict[str, Any]:
    return {
        "attention.indexer.head_count": config.index_n_heads, "attention.indexer.key_length": config.index_head_dim,
    } | ({"attention.indexer.top_k": config.index_topk} if hasattr(config, "index_topk") else {})  # fmt: skip


def streams(config: Any) -> dict[str, Any]:
    return {
        "hyper_connection.count": config.hc_mult, "hyper_connection.epsilon": config.hc_eps,
        "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
    }  # fmt: skip


def hy_v4() -> tuple[Any, dict[str, Any]]:
    config = LATENTS["hy_v4"]()
    return config, latents(
        config, **streams(config), **{"hyper_connection.magnitude": config.hc_magnitude}
    )  # fmt: skip


def dots3_note() -> tuple[Any, dict[str, Any]]:
    config = LATENTS["dots3_note"](swa_q_lora_rank=12)
    config.allow_global_per_layer_attribute_access, own = True, config.per_layer_config[1]
    flags = [kind == "sliding_attention" for kind in config.layer_types]
    full, near = (config.rope_parameters[kind]["rope_theta"] for kind in ("indexed_attention", "sliding_attention"))
    return config, latents(config, **{
        "attention.head_count": [own.num_attention_heads if each else config.num_attention_heads for each in flags],
        "attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": flags,
        "attention.kv_lora_rank_swa": own.kv_lora_rank, "attention.value_length_mla_swa": own.v_head_dim,
        "attention.key_length_mla_swa": own.qk_nope_head_dim + own.qk_rope_head_dim, "rope.freq_base": full,
        "rope.freq_base_swa": near,
    })  # fmt: skip


def minimax_m3() -> tuple[Any, dict[str, Any]]:
    config = EXPERTS["minimax_m3"]()
    return config, {
        **index(config), "feed_forward_length": 40, "expert_shared_count": 1, "expert_weights_norm": True,
        "expert_weights_scale": config.routed_scaling_factor, "rope.dimension_count": 8,
        "attention.indexer.top_k": config.index_topk_blocks, "attention.indexer.block_size": config.index_block_size,
        "attention.indexer.local_blocks": config.index_local_blocks, "leading_dense_block_count": 1,
    }  # fmt: skip


def deepseek4(**more: Any) -> tuple[Any, dict[str, Any]]:
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    config = _v4(
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}, layer_types=kinds,
        num_hidden_layers=3, num_hash_layers=1, **more,
    )  # fmt: skip
    main, compress = config.rope_parameters["main"], config.rope_parameters["compress"]
    values = {
        **index(config), **streams(config), "expert_shared_count": 1, "hash_layer_count": 1, "rope.dimension_count": 8,
        "expert_weights_scale": config.routed_scaling_factor, "attention.q_lora_rank": config.q_lora_rank,
        "attention.output_lora_rank": config.o_lora_rank, "attention.output_group_count": config.o_groups,
        "attention.compress_ratios": [0, 4, 128, 0], "attention.sliding_window": config.sliding_window,
        "attention.compress_rope_freq_base": compress["rope_theta"], "rope.freq_base": main["rope_theta"],
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters, "nextn_predict_layers": 1,
    }  # fmt: skip
    if compress["rope_type"] == "yarn":
        values |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": compress["factor"],
            "rope.scaling.original_context_length": compress["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
        }  # fmt: skip
    return config, values


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
FILES = {
    "deepseek32": lambda: (config := LATENTS["deepseek_v32"](), latents(config)),
    "deepseek4": deepseek4,
    "deepseek4-yarn": lambda: deepseek4(rope_parameters=YARN),
    "dots3note": dots3_note,
    "hy_v4": hy_v4,
    "minimax-m3": minimax_m3,
}


@pytest.mark.parametrize("case", FILES)
def test_chosen_positions_from_gguf(case: str, tmp_path: Path) -> None:
    arch = case.removesuffix("-yarn")
    config, more = FILES[case]()
    torch.manual_seed(0)
    theirs = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    values = {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", 1),
        "attention.key_length": config.head_dim, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "context_length": config.max_position_embeddings,
        "expert_feed_forward_length": theirs.model.layers[-1].mlp.experts.down_proj.shape[-1],
        "expert_count": 8 if arch != "deepseek32" else 16, "expert_used_count": 3, "rope.freq_base": 1e4,
    } | more  # fmt: skip
    values = {f"{arch}.{name}": value for name, value in values.items()}
    same(loaded(tmp_path, arch, values, converted(arch, theirs)), theirs, length=150 if arch == "deepseek4" else 100)
