"""State space models of `transformers` as GGUF files, with the changes that llama.cpp's converter makes.

Names come from the gguf package's own map; the changes are written down here once more, apart from lmstate's undoing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.files import ggufs

Tensors = dict[str, np.ndarray]


def write(path: Path, arch: str, model: Any, folder: Path, **other: Any) -> Path:
    """`model` as a file of architecture `arch`; `folder`: an empty one, to save it to on the way.

    `other`: keys of `ggufs.SIZES` that the file is to give other values than the model has.
    """
    model.save_pretrained(folder)
    config = model.config
    saved = {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    saved = stack_experts({name: change(arch, config, name, value) for name, value in saved.items()}, config)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors: Tensors = {}
    for name, value in saved.items():
        for part, numbers in parts(config, name, value):
            found = part if part.startswith("blk.") else names.get_name(part, (".weight", ".bias"))
            assert found is not None, part
            tensors[found] = np.ascontiguousarray(numbers)
    return ggufs.write(path, arch, METADATA[arch](config), tensors, sizes={**sizes(config), **other})


def sizes(config: Any) -> dict[str, Any]:
    """The keys that every file has; attention is counted 0 where there is none."""
    layers = config.num_hidden_layers
    kinds = {"mamba": 0, "mamba2": 0, "falcon_mamba": 0}
    heads = kinds.get(config.model_type, getattr(config, "num_attention_heads", 0))
    attentive = attention_layers(config)
    kv: Any = getattr(config, "num_key_value_heads", 0)
    if attentive is not None:
        kv = [kv if layer in attentive else 0 for layer in range(layers)]
    keys = {
        "layers": layers,
        "hidden": config.hidden_size,
        "inner": 0 if heads == 0 else config.intermediate_size,
        "heads": heads,
        "kv_heads": kv if heads else None,
        "head_dim": getattr(config, "head_dim", None) if heads else None,
        "eps": getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon,
    }
    if config.model_type == "nemotron_h":
        keys["inner"] = [config.intermediate_size if kind == "mlp" else 0 for kind in config.layers_block_type]
    return keys


def attention_layers(config: Any) -> list[int] | None:
    """None: every layer has attention, or none."""
    if config.model_type == "jamba":
        kinds = config.layers_block_type
    elif config.model_type in ("granitemoehybrid", "nemotron_h"):
        kinds = config.layer_types
    else:
        return None
    return [layer for layer, kind in enumerate(kinds) if kind in ("attention", "full_attention")]


def change(arch: str, config: Any, name: str, value: np.ndarray) -> np.ndarray:
    """What becomes of a tensor's numbers and shape."""
    one_head_each = arch in ("mamba", "jamba")  # Mamba-1 decays each feature and state by itself
    if name.endswith("conv1d.weight"):
        return value.squeeze(1)
    if name.endswith("A_log"):
        value = -np.exp(value)
        return value if one_head_each else value[:, None]
    if name.endswith(".D") and not one_head_each:
        return value[:, None]
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        groups = config.mamba_n_groups if hasattr(config, "mamba_n_groups") else config.n_groups
        return value.reshape(groups, -1)
    if arch in ("granite", "granitehybrid") and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
    return value * multiplier(config, name) if arch == "falcon-h1" else value


def multiplier(config: Any, name: str) -> Any:
    """Falcon-H1's, by which its weights are multiplied."""
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if "in_proj" in name:
        inner, groups = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        spans = [inner, inner, groups, groups, config.mamba_n_heads]
        return np.repeat(config.ssm_multipliers, spans)[:, None].astype(np.float32) * config.ssm_in_multiplier
    return next((np.float32(factor) for part, factor in factors.items() if f".{part}" in f".{name}"), np.float32(1))


def stack_experts(saved: Tensors, config: Any) -> Tensors:
    """Experts that the checkpoint has one by one, as one tensor for each of their matrices."""
    stacked: Tensors = {}
    for name, value in saved.items():
        before, _, after = name.partition(".experts.")
        if not after:
            stacked[name] = value
            continue
        matrix = after.split(".", 1)[1]
        layer = before.split(".layers.")[1].split(".")[0]
        each = [saved[f"{before}.experts.{i}.{matrix}"] for i in range(config.num_local_experts)]
        stacked[f"model.layers.{layer}.mlp.experts.{matrix}"] = np.stack(each)
    return stacked


def parts(config: Any, name: str, value: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """A tensor under the name to look up, or several that the converter makes of one."""
    if name.endswith(".dt_bias"):
        return [(name.replace(".dt_bias", ".dt_proj.bias"), value)]
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("correction_bias", "correction.bias"), value)]
    layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else ""
    end = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    for prefix, ending in (("shared_mlp", end), ("block_sparse_moe", "_exps")):
        if name.endswith(f"{prefix}.input_linear.weight"):
            gate, up = np.split(value, 2, axis=-2)
            return [(f"blk.{layer}.ffn_gate{ending}.weight", gate), (f"blk.{layer}.ffn_up{ending}.weight", up)]
        if name.endswith(f"{prefix}.output_linear.weight"):
            return [(f"blk.{layer}.ffn_down{ending}.weight", value)]
    return [(name, value)]


def _space(arch: str, state: int, kernel: int, inner: int, rank: int, groups: int | None = None) -> dict[str, Any]:
    keys = {"conv_kernel": kernel, "inner_size": inner, "state_size": state, "time_step_rank": rank}
    return {f"{arch}.ssm.{key}": value for key, value in (keys | ({"group_count": groups} if groups else {})).items()}


def _mamba(config: Any) -> dict[str, Any]:
    keys = _space("mamba", config.state_size, config.conv_kernel, config.intermediate_size, config.time_step_rank)
    return {**keys, "mamba.ssm.dt_b_c_rms": config.model_type == "falcon_mamba"}


def _mamba2(config: Any) -> dict[str, Any]:
    inner = config.num_heads * config.head_dim
    return _space("mamba2", config.state_size, config.conv_kernel, inner, config.num_heads, config.n_groups)


def _jamba(config: Any) -> dict[str, Any]:
    inner = config.mamba_expand * config.hidden_size
    keys = _space("jamba", config.mamba_d_state, config.mamba_d_conv, inner, config.mamba_dt_rank)
    return {
        **keys,
        "jamba.expert_count": config.num_experts,
        "jamba.expert_used_count": config.num_experts_per_tok,
    }


def _bamba(arch: str, config: Any) -> dict[str, Any]:
    inner = config.mamba_n_heads * config.mamba_d_head
    heads, groups = config.mamba_n_heads, config.mamba_n_groups
    return _space(arch, config.mamba_d_state, config.mamba_d_conv, inner, heads, groups)


def _granite(arch: str, config: Any) -> dict[str, Any]:
    keys = _bamba(arch, config) if arch == "granitehybrid" else {}
    if config.num_local_experts:
        keys |= {
            f"{arch}.expert_count": config.num_local_experts,
            f"{arch}.expert_used_count": config.num_experts_per_tok,
            f"{arch}.expert_shared_feed_forward_length": config.shared_intermediate_size,
        }
    return keys | {
        f"{arch}.attention.scale": config.attention_multiplier,
        f"{arch}.embedding_scale": config.embedding_multiplier,
        f"{arch}.residual_scale": config.residual_multiplier,
        f"{arch}.logit_scale": config.logits_scaling,
        f"{arch}.rope.scaling.finetuned": config.position_embedding_type == "rope",
        f"{arch}.rope.freq_base": 10000.0,
    }


def _falcon_h1(config: Any) -> dict[str, Any]:
    return _bamba("falcon-h1", config) | {"falcon-h1.rope.freq_base": config.rope_parameters["rope_theta"]}


def _nemotron_h(arch: str, config: Any) -> dict[str, Any]:
    inner = config.mamba_num_heads * config.mamba_head_dim
    keys = _space(arch, config.ssm_state_size, config.conv_kernel, inner, config.mamba_num_heads, config.n_groups)
    if arch == "nemotron_h":
        return keys
    latent = {f"{arch}.moe_latent_size": config.moe_latent_size} if config.moe_latent_size else {}
    return {
        **keys,
        **latent,
        f"{arch}.expert_count": config.n_routed_experts,
        f"{arch}.expert_used_count": config.num_experts_per_tok,
        f"{arch}.expert_feed_forward_length": config.moe_intermediate_size,
        f"{arch}.expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        f"{arch}.expert_weights_norm": config.norm_topk_prob,
        f"{arch}.expert_weights_scale": config.routed_scaling_factor,
        f"{arch}.expert_group_count": config.n_group,
    }


METADATA = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "granite": partial(_granite, "granite"),
    "granitehybrid": partial(_granite, "granitehybrid"),
    "falcon-h1": _falcon_h1,
    "nemotron_h": partial(_nemotron_h, "nemotron_h"),
    "nemotron_h_moe": partial(_nemotron_h, "nemotron_h_moe"),
}


def randomized(config: Any) -> Any:
    """A small model of `transformers` in float32 with weights that all show, buffers of the router's among them."""
    from transformers import AutoModelForCausalLM

    from tests.zoo import randomize

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = 0.1 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1))
    return model
