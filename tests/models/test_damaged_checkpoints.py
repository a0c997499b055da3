"""Configs and tensors that do not fit each other are refused by name, before anything large is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.errors import ModelError
from lmstate.models.families import build
from tests.zoo import pair

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def refused(folder: Path, case: str, change: Change, match: str) -> None:
    pair(case)[0].save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=match):
        build(WeightLoader(open_source(folder), "float32"))


def without(*ends: str, **fields: Any) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config.update(fields)
        for name in [name for name in tensors if name.endswith(ends)]:
            tensors.pop(name)

    return change


def tensor(end: str, make: Callable[[Tensor], Tensor]) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        names = [name for name in tensors if name.endswith(end)]
        assert names
        for name in names:
            tensors[name] = make(tensors[name])

    return change


def moved(one: str, other: str) -> Change:
    """A row of each stacked matrix moves to its neighbor."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(one)]:
            beside = name.replace(one, other)
            tensors[name], tensors[beside] = tensors[name][1:], torch.cat([tensors[name][:1], tensors[beside]])

    return change


def all_of(*changes: Change) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for each in changes:
            each(config, tensors)

    return change


def one_more(x: Tensor) -> Tensor:
    return torch.cat([x, x[:1]])


CASES: dict[str, tuple[str, Change, str]] = {
    "biases of attention": (
        "llama", without(attention_bias=True), r"lacks some of .*q_proj\.bias"
    ),
    "biases of feed-forward parts": ("llama", without(mlp_bias=True), r"lacks some of .*gate_proj\.bias"),
    "bias of a convolution": ("mamba2", without("conv1d.bias", use_conv_bias=True), r"lacks some of .*conv1d\.bias"),
    "a head": ("llama", without("lm_head.weight", tie_word_embeddings=False), "base model without"),
    "rows of k in q": ("llama", moved("k_proj.weight", "q_proj.weight"), r"[qk]_proj\.weight has the shape"),
    "rows of up in gate": ("llama", moved("up_proj.weight", "gate_proj.weight"), r"gate_proj\.weight has the shape"),
    "an expert too many": ("gpt_oss", tensor("experts.gate_up_proj", one_more), r"gate_up_proj has the shape"),
    "columns too many": (
        "gpt_oss", tensor("experts.down_proj", lambda x: torch.cat([x, x], -1)), r"down_proj has the shape"
    ),
    "experts without an axis": ("llama4", tensor("experts.down_proj", lambda x: x[0]), r"down_proj has the shape"),
    "an expert too many of llama4": ("llama4", tensor("experts.gate_up_proj", one_more), r"gate_up_proj has the shape"),
    "an expert too many of granite": (
        "granitemoe", tensor("block_sparse_moe.input_linear.weight", one_more), "input_linear.weight has the shape"
    ),
    "a row too many": ("qwen3_next", tensor("in_proj_qkvz.weight", one_more), r"in_proj_qkvz\.weight has the shape"),
    "decays too many": ("kimi_linear", tensor("A_log", lambda x: torch.cat([x, x], -1)), r"A_log has the shape"),
    "too few layers": ("llama4", without(no_rope_layers=[1, 0]), "no_rope_layers"),
    "heads beyond memory": (
        "qwen3_next", without(linear_num_value_heads=2**20, linear_value_head_dim=2**10), "has the shape"
    ),
    "features beyond memory": (
        "falcon_h1", without(mamba_n_heads=2**20, mamba_d_head=2**16, mamba_d_ssm=2**36), "mamba_d_ssm|has the shape"
    ),
    "a gate that no delta rule has": ("qwen3_next", without(hidden_act="gelu"), "hidden_act"),
    "another activation of Ling": ("bailing_hybrid", without(hidden_act="gelu"), "hidden_act"),
    "a decay that grows": ("bailing_hybrid", without(kda_lower_bound=1.0), "kda_lower_bound"),
    "lightning attention": ("bailing_hybrid", without("dt_bias"), "delta rule of Ling 3.0"),
    "two experts a token": ("zaya", without(num_experts_per_tok=2), "num_experts_per_tok"),
    "a scale a head too many": ("zaya", tensor("qk_norm.temp", one_more), r"qk_norm\.temp has the shape"),
    "gates without a bound": ("xlstm", without(gate_soft_cap=None), "gate_soft_cap"),
    "gates of a wide bound": ("xlstm", without(gate_soft_cap=100.0), "gate_soft_cap"),
    "heads that share unevenly": ("xlstm", without(num_heads=5), "cannot share"),
    "two widths": ("xlstm", without(embedding_dim=40), "embedding_dim"),
    "a kind of layers that LFM3 has not": ("lfm3", without(layer_types=["mamba"] * 5), "layer_types"),
    "a gate a head too many": ("lfm3", tensor("self_attn.gate_proj.weight", one_more), r"gate_proj\.weight has"),
    "features beyond memory of RWKV": ("rwkv", without(attention_hidden_size=2**20), "has the shape"),
    "a bias that is a matrix, and no matrix": (
        "starcoder2", all_of(without("k_proj.weight"), tensor("k_proj.bias", lambda x: x[:, None])),
        r"lacks the tensor '.*k_proj\.weight'",
    ),
    "heads that no bias has": ("afmoe-biased", without(head_dim=12_000), r"q_proj\.weight has the shape"),
    "heads that share no width": ("gpt2", without(n_head=6000), "cannot share a width"),
    "halved to nothing": ("rwkv", without(num_hidden_layers=3000, rescale_every=6), "half a stream"),
    "keys of other sizes to read": (
        "gemma4", without(layer_types=["full_attention"] * 6), "layer 4 read the keys and values of layer 3"
    ),
    "convolutions beyond memory": (
        "zaya", without(num_attention_heads=2**20, head_dim=2**20), r"q_proj\.weight has the shape"
    ),
    "a rope of two features": (
        "llama", without(head_dim=2, rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "nothing to stretch"
    ),
    "ropes that are no object": ("deepseek_v4", without(rope_parameters="yarn"), "rope_parameters must be an object"),
    "ropes of step3p5 that are no object": (
        "step3p5", lambda config, _: config["text_config"].update(rope_parameters=[1]),
        "rope_parameters must be an object"
    ),
    "a rope that does not turn": (
        "llama",
        without(rope_parameters={"rope_type": "longrope", "short_factor": [0] * 8, "long_factor": [1] * 8}),
        "short_factor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    refused(tmp_path, *CASES[name])
