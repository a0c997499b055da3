"""Inkling from GGUF: its logits are those of transformers on the original weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmstate.errors import ModelError
from tests.files.test_gguf_attention import loaded, same
from tests.zoo import auto, randomize
from tests.zoo.conv import _inkling

OUTSIDE = {
    "model.embed_tokens": "token_embd", "model.embed_tokens.embed_norm": "token_embd_norm", "model.norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip
INSIDE = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkvr"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"self_attn.{part}_sconv.conv1d": f"shortconv_{part}" for part in "kv"},
    **{f"{part}_sconv.conv1d": f"shortconv_{part}" for part in ("attn", "mlp")},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_output", "self_attn.rel_logits_proj.proj": "attn_rel_proj",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.global_scale": "ffn_gscale", "mlp.gate.global_scale": "ffn_gscale",
}  # fmt: skip


def changed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor as the converter writes it, under its name inside a block."""
    if name == "mlp.gate.e_score_correction_bias":
        yield "exp_probs_b.bias", tensor
    elif name == "mlp.experts.gate_up_proj":
        yield from ((f"ffn_{half}_exps.weight", each) for half, each in zip(("gate", "up"), tensor.chunk(2, 1)))
    else:
        yield (
            f"{INSIDE[name.removesuffix('.weight')]}.weight",
            tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor,
        )


def converted(theirs: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for full, tensor in theirs.state_dict().items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", full):
            out |= {f"blk.{match[1]}.{name}": value for name, value in changed(match[2], tensor)}
        else:
            out[f"{OUTSIDE[full.removesuffix('.weight')]}.weight"] = tensor
    return {name: np.ascontiguousarray(each.detach().float().numpy()) for name, each in out.items()}


def values_of(config: Any) -> dict[str, Any]:
    slides = [kind == "hybrid_sliding" for kind in config.layer_types]
    values = {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [
            config.swa_num_key_value_heads if each else config.num_key_value_heads for each in slides
        ],
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "context_length": config.max_position_embeddings,
        "expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.route_scale, "expert_gating_func": 2,
        "attention.sliding_window": config.sliding_window_size, "attention.sliding_window_pattern": slides,
        "d_rel": config.d_rel, "rel_extent": config.rel_extent, "rel_extent_swa": config.sliding_window_size,
        "shortconv_kernel": config.conv_kernel_size, "dense_block_count": config.mlp_layer_types.count("dense"),
        "logit_scale_denom": config.logits_mup_width_multiplier, "log_scaling_alpha": config.log_scaling_alpha,
        "log_scaling_n_floor": config.log_scaling_n_floor or 0, "unpadded_vocab_size": config.unpadded_vocab_size,
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    return {f"inkling.{name}": value for name, value in values.items()}


def small(**changes: Any) -> Any:
    config = _inkling(
        **{"swa_head_dim": 16, "mlp_layer_types": ["dense", "sparse"], "layer_types": ["hybrid_sliding", "hybrid"],
           "rel_extent": 40, "unpadded_vocab_size": 99, **changes}
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    return theirs


@pytest.mark.parametrize("changes", [{}, {"vocab_size": 104, "log_scaling_n_floor": 20, "n_shared_experts": 1}])
def test_inkling_from_gguf(changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = small(**changes)
    same(loaded(tmp_path, "inkling", values_of(theirs.config), converted(theirs)), theirs)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rel_extent_swa", 7, "by other distances"),
        ("attention.sliding_window_pattern", [True, True], "other numbers of key heads"),
        ("attention.sliding_window_pattern", 6, "does not list which"),
    ],
)
def test_a_damaged_inkling_is_refused(name: str, value: Any, message: str, tmp_path: Path) -> None:
    theirs = small()
    values = values_of(theirs.config) | {f"inkling.{name}": value}
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path, "inkling", values, converted(theirs))
