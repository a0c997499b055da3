"""Models whose layers share keys and values in GGUF: Gemma 3n and Gemma 4."""

from __future__ import annotations

import math
from statistics import NormalDist

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    HEAD_NORMS,
    MOST_LAYERS,
    MOST_WIDTH,
    OUTSIDE,
    Architecture,
    HFConfig,
    Tensors,
    layer_kinds,
)
from lmstate.checkpoints.gguf.architectures.windowed import GEMMA
from lmstate.errors import ModelError

UNTURNED = 1e20
"""A divisor of a rotary frequency from which on the channels do not rotate."""


def _shared(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    layers = config["num_hidden_layers"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["sliding_window"] = metadata.int(f"{prefix}.attention.sliding_window", 1)
    kinds = layer_kinds(metadata, prefix, layers)
    if kinds is None:
        raise ModelError(f"{metadata.where} does not list which of its {layers} layers have a window; it is damaged")
    config["layer_types"] = kinds
    config["num_kv_shared_layers"] = metadata.int(f"{prefix}.attention.shared_kv_layers", 0, MOST_LAYERS, default=0)
    config["hidden_size_per_layer_input"] = metadata.int(
        f"{prefix}.embedding_length_per_layer_input", 0, MOST_WIDTH, default=0
    )
    if (table := tensors.get("per_layer_token_embd.weight")) is not None:
        config["vocab_size_per_layer_input"] = table.shape[0]
    config["final_logit_softcapping"] = metadata.float(f"{prefix}.final_logit_softcapping", 1e-6, default=None)
    config["rope_local_base_freq"] = metadata.float(f"{prefix}.rope.freq_base_swa", 1.0, 1e18, default=10_000.0)


def _gemma3n(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    _shared(metadata, prefix, config, tensors)
    if (low := tensors.get("blk.0.laurel_l.weight")) is not None:
        config["laurel_rank"] = low.shape[0]
    config["altup_num_inputs"] = metadata.int(f"{prefix}.altup.num_inputs", 2, 64)
    config["altup_active_idx"] = metadata.int(f"{prefix}.altup.active_idx", 0, 63)
    # The file has by how many deviations the gates that count are above their mean; minus infinity lets all count.
    scales = metadata.get(f"{prefix}.activation_sparsity_scale", [])
    if not isinstance(scales, list) or not all(isinstance(each, float) and not math.isnan(each) for each in scales):
        raise ModelError(f"{metadata.where} must have one number a layer in '{prefix}.activation_sparsity_scale'")
    config["activation_sparsity_pattern"] = [NormalDist().cdf(scale) for scale in scales]


def gemma4(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Config of Gemma 4, and of the stack in its assistants."""
    _shared(metadata, prefix, config, tensors)
    layers, full = config["num_hidden_layers"], [kind == "full_attention" for kind in config["layer_types"]]
    # The file does not say it: tokens of a picture see all of it in the models without embeddings for each layer.
    config["use_bidirectional_attention"] = None if config.get("hidden_size_per_layer_input") else "vision"
    config["global_head_dim"] = metadata.int(f"{prefix}.attention.key_length", 1, MOST_WIDTH)
    config["head_dim"] = metadata.int(f"{prefix}.attention.key_length_swa", 1, MOST_WIDTH)
    config["attention_k_eq_v"] = any(
        each and f"blk.{layer}.attn_k.weight" in tensors and f"blk.{layer}.attn_v.weight" not in tensors
        for layer, each in enumerate(full)
    )
    kv_heads = _by_layer(metadata, f"{prefix}.attention.head_count_kv", layers)
    config["per_layer_config"] = {
        str(layer): {"head_dim": config["global_head_dim"], "num_key_value_heads": kv_heads[layer]}
        if each
        else {"num_key_value_heads": kv_heads[layer]}
        for layer, each in enumerate(full)
    }
    widths = _by_layer(metadata, f"{prefix}.feed_forward_length", layers)
    config["intermediate_size"] = widths[0]
    config["use_double_wide_mlp"] = widths[-1] == 2 * widths[0]
    config.pop("partial_rotary_factor", None)
    divisors = (config.pop("rope_scaling", None) or {}).get("long_factor", [1.0])
    if any(divisor != 1.0 and divisor < UNTURNED for divisor in divisors):
        raise ModelError(f"{metadata.where} stretches some rotary frequencies, which no Gemma 4 does")
    rotated = sum(divisor == 1.0 for divisor in divisors) / len(divisors)
    config["rope_parameters"] = {
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": rotated, "rope_theta": config["rope_theta"],
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]},
    }  # fmt: skip
    if count := metadata.int(f"{prefix}.expert_count", 0, 4096, default=0):
        config |= {"enable_moe_block": True, "num_experts": count}
        config["top_k_experts"] = metadata.int(f"{prefix}.expert_used_count", 1, count)
        config["moe_intermediate_size"] = metadata.int(f"{prefix}.expert_feed_forward_length", 1, MOST_WIDTH)


def _by_layer(metadata: Config, name: str, layers: int) -> tuple[int, ...]:
    """A number that GGUF gives once or per layer, for every layer."""
    if isinstance(metadata.get(name), list):
        return metadata.ints(name, layers, 1, MOST_WIDTH)
    return (metadata.int(name, 1, MOST_WIDTH),) * layers


PER_LAYER = {
    **GEMMA,
    **HEAD_NORMS,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
OUTSIDE_PER_LAYER = {
    **OUTSIDE,
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}

SHARED = {
    "gemma3n": Architecture(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        {
            **PER_LAYER,
            "altup_correct_coef": "altup.correction_coefs",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        extra=_gemma3n,
        whole={"altup_correct_scale.weight": "altup.correct_output_scale"},
        outside={
            **OUTSIDE_PER_LAYER,
            "altup_proj.weight": "model.altup_projections.{each}.weight",
            "altup_unembd_proj.weight": "model.altup_unembed_projections.{each}.weight",
        },
    ),
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        {
            **PER_LAYER,
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        },
        extra=gemma4,
        whole={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.weight": "router.proj.weight",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps.weight": "experts.{expert}.gate_up_proj.weight",
            "ffn_down_exps.weight": "experts.{expert}.down_proj.weight",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        outside=OUTSIDE_PER_LAYER,
        varied=True,
    ),
}
