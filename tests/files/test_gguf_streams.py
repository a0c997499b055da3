"""Models of wide residual streams in GGUF: their logits are those of transformers on the original weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import lmstate
from lmstate.checkpoints.gguf.blocks import PackedRows
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.errors import ModelError
from lmstate.models.families import build
from lmstate.models.layers.ngrams import NgramBlock
from tests.files import test_gguf_delta as delta
from tests.files.ggufs import blocks, floats, write
from tests.files.test_gguf_attention import loaded, same
from tests.zoo import CASES, auto, randomize

OUTSIDE = {
    "model.embed_tokens": "token_embd", "lm_head": "output",
    "model.hyper_connection_mixer.hc_norm": "output_hc_norm",
    **{f"model.hyper_connection_mixer.input_mix_weight_{part}": f"output_hc_{part}" for part in ("down", "up")},
}  # fmt: skip
INSIDE = {
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_proj": "ssm_dt", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}, "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"self_attn.indexer.{part}_layernorm": f"indexer.{part}_norm" for part in "qk"},
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"ple.{part}_proj": f"ple_{part}" for part in ("key", "value")}, "ple.conv1d": "ple_conv1d",
    **{f"ple.norm_{part}": f"ple_norm_{part}" for part in ("key", "query", "conv")},
    **{
        f"{theirs}_hyper_connection.{each}": f"hc_{ours}_{name}"
        for theirs, ours in (("attn", "attn"), ("mlp", "ffn"))
        for each, name in {
            "hc_norm": "norm", "block_inject_weight": "inject", "input_mix_weight_down": "down",
            "input_mix_weight_up": "up",
        }.items()
    },
}  # fmt: skip
ONE_MORE = re.compile(r"\.ple\.norm_\w+\.weight$|layernorm\.weight$")
BUFFERS = ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")


def qwen4_exp(theirs: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file, as llama.cpp's converter writes them."""
    saved = {name: tensor.float().numpy() for name, tensor in theirs.state_dict().items()}
    yield from qwen4_exp_tensors(theirs.config, saved)


def qwen4_exp_tensors(config: Any, saved: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    shards = []
    for full, tensor in saved.items():
        value = delta.tiled_heads("qwen4exp", config, full, tensor)
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", full)
        prefix = f"blk.{match[1]}." if match else ""
        if full.endswith(BUFFERS) or (full == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if ".ngram_embedding" in full:
            shards.append(value)
        elif full.endswith("index_qk_proj.weight"):
            first = config.indexer_n_heads * config.indexer_head_dim
            yield from (
                (f"{prefix}indexer.{part}_proj.weight", half) for part, half in zip("qk", np.split(value, [first]))
            )
        elif full.endswith("experts.gate_up_proj"):
            yield from (
                (f"{prefix}ffn_{part}_exps.weight", half) for part, half in zip(("gate", "up"), np.split(value, 2, 1))
            )
        elif full.endswith("experts.down_proj"):
            yield f"{prefix}ffn_down_exps.weight", value
        elif ONE_MORE.search(full):
            stem, _, ending = (match[2] if match else full).rpartition(".")
            yield f"{prefix}{INSIDE[stem]}.{ending}", value + 1
        else:
            for name, each in delta.changed(config, match[2] if match else full, value):
                stem, _, ending = name.rpartition(".")
                known = name if name.endswith("A_log") else stem
                ending = "" if name.endswith("A_log") else f".{ending}"
                yield f"{prefix}{INSIDE[known] if match else OUTSIDE[known]}{ending}", each
    if shards:
        yield "per_layer_token_embd.weight", np.concatenate(shards)


def qwen4_exp_values(theirs: Any) -> dict[str, Any]:
    config, layers = theirs.config, theirs.config.num_hidden_layers
    kinds = ["linear" in kind for kind in config.layer_types]
    values = {
        "block_count": layers, "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "context_length": config.max_position_embeddings,
        "hyper_connection.count": config.hc_count, "hyper_connection.low_rank": config.hc_lowrank,
        "attention.indexer.head_count": config.indexer_n_heads, "attention.indexer.top_k": config.indexer_budget,
        "attention.indexer.key_length": config.indexer_head_dim,
        "attention.compress_ratios": [0 if linear else config.indexer_compress_ratio for linear in kinds],
    }  # fmt: skip
    for layer in config.ple_layer_ids:
        table = theirs.model.layers[layer - 1].ple.ple_embedding
        values |= {
            "ple.layers": [layer - 1], "ple.ngram_size": config.ngram_size,
            "ple.heads_per_ngram": config.heads_per_ngram,
            "ple.conv_kernel": config.ple_conv_kernel_size, "ple.eos_token_id": config.eos_token_id,
            "embedding_length_per_layer_input": config.ple_embed_dim // len(table.ngram_heads_vocab_sizes),
            "ple.layer_multipliers": table.layer_multipliers.tolist(),
            "ple.head_offsets": table.ngram_heads_offsets.tolist(),
            "ple.head_vocab_sizes": table.ngram_heads_vocab_sizes.tolist(),
        }  # fmt: skip
    return {f"qwen4exp.{name}": value for name, value in values.items()} | delta.metadata("qwen4exp", config, 0)


def original(case: str, **changes: Any) -> Any:
    make = CASES[case]
    config = make.func(*make.args, **{**make.keywords, **changes})  # type: ignore[attr-defined]
    torch.manual_seed(0)
    theirs = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    return theirs


def written(theirs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors = {name: np.ascontiguousarray(value) for name, value in qwen4_exp(theirs)}
    return qwen4_exp_values(theirs), tensors


def opened(folder: Path, values: dict[str, Any], tensors: dict[str, Any]) -> lmstate.Model:
    path = write(folder / "model.gguf", "qwen4exp", values, tensors, sizes={"inner": None})
    return build(WeightLoader(open_source(path), "float32"))


@pytest.mark.parametrize(
    "changes",
    [{"ple_layer_ids": [2]}, {"ple_layer_ids": [], "linear_num_value_heads": 2}, {"ple_layer_ids": [1], "seed": 3}],
)
def test_qwen4_exp_from_gguf(changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = original("qwen4_exp", **changes)
    values, tensors = written(theirs)
    same(opened(tmp_path, values, tensors), theirs)
    values |= {"qwen4exp.block_count": 5, "qwen4exp.nextn_predict_layers": 1}
    values["qwen4exp.attention.compress_ratios"] += [0]
    more = {"blk.4.nextn.eh_proj.weight": floats(48, 96), "blk.4.hc_attn_norm.weight": floats(192)}
    same(opened(tmp_path, values, tensors | more), theirs)


def test_a_quantized_table_of_ngrams_is_read_by_row_where_it_lies(tmp_path: Path) -> None:
    theirs = original("qwen4_exp", ple_layer_ids=[1], ple_embed_dim=128)
    values, tensors = written(theirs)
    rows = tensors["per_layer_token_embd.weight"]
    for kind in ("Q8_0", "IQ4_NL"):  # whole groups of 32, and not
        packed = blocks(kind, *rows.shape) if kind == "IQ4_NL" else gguf.quantize(rows, gguf.GGMLQuantizationType[kind])
        model = opened(tmp_path, values, tensors | {"per_layer_token_embd.weight": (packed, kind)})
        block = model.blocks[0]
        assert isinstance(block, NgramBlock)
        (table,) = block.ngrams.table.parts
        at = torch.tensor([len(rows) - 1, 3])
        whole = gguf.dequantize(packed, gguf.GGMLQuantizationType[kind])
        assert isinstance(table, PackedRows) and np.array_equal(table[at].numpy(), whole[at])
        same(model, theirs_with(theirs, whole))


def theirs_with(theirs: Any, table: np.ndarray) -> Any:
    parts = theirs.model.layers[0].ple.ple_embedding.ngram_embedding.parameters()
    first = 0
    for part in parts:
        part.data = torch.from_numpy(table[first : first + len(part)].copy())
        first += len(part)
    return theirs


# ---- GLM-5.3

GLM_OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
GLM_INSIDE = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}, "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("g_a", "g_b")}, "self_attn.b_proj": "ssm_beta",
    **{f"self_attn.forget_gate.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b")}, "self_attn.o_norm": "ssm_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.indexer.wk": "indexer.attn_k", "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.k_norm": "indexer.k_norm", "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
BARE = {
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    **{f"self_attn.indexer.index_kpool_compress_{part}": f"indexer.kpool_{part}.weight" for part in ("gate", "ape")},
    **{f"{part}_hc.{each}": f"hc_{part}_{each}.weight" for part in ("attn", "ffn") for each in ("fn", "base", "scale")},
}  # fmt: skip


def glm5_next(theirs: Any) -> Iterator[tuple[str, np.ndarray]]:
    saved = {name: tensor.float().numpy() for name, tensor in theirs.state_dict().items()}
    yield from glm5_next_tensors(theirs.config.get_text_config(), saved)


def glm5_next_tensors(config: Any, saved: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    for full, value in saved.items():
        full = full.removeprefix("model.language_model.")
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", full)
        if match is None:
            if not full.startswith("model.visual"):
                yield f"{GLM_OUTSIDE[full.removesuffix('.weight')]}.weight", value
            continue
        prefix, name = f"blk.{match[1]}.", match[2]
        if name in BARE:
            yield f"{prefix}{BARE[name]}", value
        elif name == "self_attn.forget_gate.A_log":
            yield f"{prefix}ssm_a", -np.exp(value)
        elif name == "self_attn.conv1d.weight":
            for part, taps in zip("qkv", np.split(value, 3)):
                yield f"{prefix}ssm_conv1d_{part}.weight", taps.reshape(1, len(taps), 1, -1)
        elif name == "mlp.experts.gate_up_proj":
            for part, half in zip(("gate", "up"), np.split(value, 2, 1)):
                yield f"{prefix}ffn_{part}_exps.weight", half
        elif name == "self_attn.kv_b_proj.weight":
            heads = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = np.split(heads, [config.qk_nope_head_dim], 1)
            yield f"{prefix}attn_k_b.weight", keys.swapaxes(1, 2)
            yield f"{prefix}attn_v_b.weight", values
        else:
            stem, _, ending = name.rpartition(".")
            yield f"{prefix}{GLM_INSIDE[stem]}.{ending}", value


def glm5_next_values(config: Any) -> dict[str, Any]:
    layers = config.num_hidden_layers
    values = {
        "block_count": layers, "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "context_length": config.max_position_embeddings,
        "attention.head_count_kv": [int("linear" not in kind) for kind in config.layer_types],
        "attention.key_length": config.kv_lora_rank, "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim, "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank, "attention.q_lora_rank": config.q_lora_rank,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.layer_norm_epsilon": 1e-6,
        "rope.dimension_count": 0, "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim, "attention.indexer.top_k": config.index_topk,
        "attention.indexer.kpool": config.index_kpool, "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim, "hyper_connection.count": config.hc_mult,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters, "hyper_connection.epsilon": config.hc_eps,
        "expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor, "expert_weights_norm": config.norm_topk_prob,
        "leading_dense_block_count": 1, "swiglu_clamp_exp": [config.swiglu_limit] * layers,
    }  # fmt: skip
    if config.linear_lower_bound is not None:
        values["kda.gate_lower_bound"] = config.linear_lower_bound
    return {f"glm5-next.{name}": value for name, value in values.items()}


@pytest.mark.parametrize("changes", [{}, {"linear_lower_bound": None, "indexer_types": ["full"] * 4, "index_kpool": 3}])
def test_glm5_next_from_gguf(changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = original("glm5_next", linear_num_heads=6, **changes)
    tensors = {name: np.ascontiguousarray(value) for name, value in glm5_next(theirs)}
    values = glm5_next_values(theirs.config.get_text_config())
    same(loaded(tmp_path, "glm5-next", values, tensors), theirs)
    drafts, width = theirs.config.get_text_config().num_hidden_layers, 48
    values |= {"glm5-next.block_count": drafts + 1, "glm5-next.nextn_predict_layers": 1}
    values["glm5-next.attention.head_count_kv"] += [1]
    more = {
        f"blk.{drafts}.nextn.eh_proj.weight": floats(width, 2 * width),
        f"blk.{drafts}.attn_norm.weight": floats(width),
    }
    same(loaded(tmp_path, "glm5-next", values, tensors | more), theirs)
    with pytest.raises(ModelError, match="rotates a part of its heads"):
        loaded(tmp_path, "glm5-next", values | {"glm5-next.rope.dimension_count": 8}, tensors)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("one rate for each", {"attention.compress_ratios": [0, 0, 0, 0]}),
        ("one rate for each", {"attention.compress_ratios": [0]}),
        ("do not lie one after the other", {"ple.head_offsets": [0, 1, 2, 3]}),
        ("ple.layers", {"ple.layers": [4]}),
        ("heads need", {"ple.head_vocab_sizes": [999, 1, 1, 1], "ple.head_offsets": [0, 999, 1000, 1001]}),
        ("name no layer", {"ple.layers": None}),
    ],
)
def test_what_does_not_fit_is_refused(message: str, changes: dict[str, Any], tmp_path: Path) -> None:
    values, tensors = written(original("qwen4_exp", ple_layer_ids=[1]))
    values |= {f"qwen4exp.{name}": value for name, value in changes.items()}
    with pytest.raises(ModelError, match=message):
        opened(tmp_path, {name: value for name, value in values.items() if value is not None}, tensors)
