"""Models whose layers share keys and values from GGUF: converted here as llama.cpp does it, their logits are those of
transformers on the original."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmstate.errors import ModelError
from tests.files.test_gguf_attention import GEMMA_NORMS, loaded, metadata, original, same
from tests.files.test_gguf_attention import INSIDE as ATTENTION
from tests.files.test_gguf_attention import OUTSIDE as ENDS
from tests.zoo import CASES

INSIDE = {
    **ATTENTION, **GEMMA_NORMS,
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "router.proj": "ffn_gate_inp",
    "altup.correction_coefs": "altup_correct_coef", "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router", "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r", "laurel.post_laurel_norm": "laurel_post_norm",
}  # fmt: skip
OUTSIDE = {
    **ENDS, "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
WHOLE = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight", "altup.correct_output_scale": "altup_correct_scale.weight",
}  # fmt: skip


def converted(model: Any) -> dict[str, Any]:
    """The tensors of a GGUF file."""
    out: dict[str, Tensor] = {}
    for full, tensor in model.state_dict().items():
        if full == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, ending = full.rpartition(".")
        if full.startswith("model.layers."):
            layer, inside = full.removeprefix("model.layers.").split(".", 1)
            stem = inside.rpartition(".")[0]
            out[f"blk.{layer}.{WHOLE.get(inside) or f'{INSIDE[stem]}.{ending}'}"] = tensor
        elif "projections" not in full:
            out[f"{OUTSIDE[stem]}.{ending}"] = tensor
    for theirs, name in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
        if hasattr(model.model, theirs):
            out[f"{name}.weight"] = torch.stack([each.weight for each in getattr(model.model, theirs)])
    return {name: np.ascontiguousarray(tensor.detach().float().numpy()) for name, tensor in out.items()}


def shared(config: Any, arch: str, **more: Any) -> dict[str, Any]:
    values = metadata(
        config, arch, attention__sliding_window=config.sliding_window,
        attention__sliding_window_pattern=[kind == "sliding_attention" for kind in config.layer_types],
        attention__shared_kv_layers=config.num_kv_shared_layers,
        embedding_length_per_layer_input=config.hidden_size_per_layer_input,
        rope__freq_base=1e6, rope__freq_base_swa=1e4, **more,
    )  # fmt: skip
    if config.final_logit_softcapping is not None:
        values[f"{arch}.final_logit_softcapping"] = config.final_logit_softcapping
    return values


def gemma4(case: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The original, the metadata of its file, and its tensors."""
    config = CASES[case]()
    config.allow_global_per_layer_attribute_access = True
    layers = [config.per_layer_config[index] for index in range(config.num_hidden_layers)]
    dim = layers[config.layer_types.index("full_attention")].head_dim
    more: dict[str, Any] = {"attention__key_length": dim, "attention__key_length_swa": config.head_dim}
    more["attention__head_count_kv"] = [each.num_key_value_heads for each in layers]
    if config.use_double_wide_mlp:
        own = config.num_hidden_layers - config.num_kv_shared_layers
        more["feed_forward_length"] = [
            config.intermediate_size * (1 if index < own else 2) for index in range(config.num_hidden_layers)
        ]
    if config.enable_moe_block:
        more |= {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
        more["expert_feed_forward_length"] = config.moe_intermediate_size
    theirs = original(config)
    tensors = converted(theirs)
    tensors["rope_freqs.weight"] = np.array([1.0] * (dim // 8) + [1e30] * (dim // 2 - dim // 8), dtype=np.float32)
    return theirs, shared(config, "gemma4", **more), tensors


@pytest.mark.parametrize("case", ["gemma4", "gemma4-experts", "gemma4-shared"])
def test_gemma4_from_gguf(case: str, tmp_path: Path) -> None:
    theirs, values, tensors = gemma4(case)
    ours = loaded(tmp_path, "gemma4", values, tensors)
    same(ours, theirs)
    assert ours.network.whole_pictures == (not theirs.config.hidden_size_per_layer_input)


def test_other_divisors_of_gemma4_are_refused(tmp_path: Path) -> None:
    _, values, tensors = gemma4("gemma4")
    tensors["rope_freqs.weight"][1] = 8.0
    with pytest.raises(ModelError, match="stretches"):
        loaded(tmp_path, "gemma4", values, tensors)


def gemma3n() -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The same of Gemma 3n."""
    config = CASES["gemma3n"]()
    theirs = original(config)
    scales = [NormalDist().inv_cdf(share) if share else -np.inf for share in config.activation_sparsity_pattern]
    more = {"altup__num_inputs": 4, "altup__active_idx": 0, "activation_sparsity_scale": scales}
    values = shared(config, "gemma3n", **more, feed_forward_length=config.intermediate_size)
    return theirs, values, converted(theirs)


def test_gemma3n_from_gguf(tmp_path: Path) -> None:
    theirs, values, tensors = gemma3n()
    same(loaded(tmp_path, "gemma3n", values, tensors), theirs)


@pytest.mark.parametrize("scales", [0.5, [0.5, 0.5], ["a", "b", "c", "d", "e"], [float("nan")] * 5])
def test_scales_that_are_none_are_refused(scales: Any, tmp_path: Path) -> None:
    _, values, tensors = gemma3n()
    with pytest.raises(ModelError, match="sparsity"):
        loaded(tmp_path, "gemma3n", {**values, "gemma3n.activation_sparsity_scale": scales}, tensors)


def test_a_tensor_of_too_many_matrices_is_refused(tmp_path: Path) -> None:
    _, values, tensors = gemma3n()
    tensors["altup_proj.weight"] = np.zeros((1_000_000, 1, 1), dtype=np.float32)
    with pytest.raises(ModelError, match="not a few matrices"):
        loaded(tmp_path, "gemma3n", values, tensors)


@pytest.mark.parametrize("pattern", [[True, False], [1] * 6, 6])
def test_a_pattern_that_is_none_is_refused(pattern: Any, tmp_path: Path) -> None:
    _, values, tensors = gemma4("gemma4")
    with pytest.raises(ModelError, match=r"6 flags|which of its 6 layers"):
        loaded(tmp_path, "gemma4", {**values, "gemma4.attention.sliding_window_pattern": pattern}, tensors)
