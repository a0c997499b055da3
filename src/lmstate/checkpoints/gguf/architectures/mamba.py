"""State space models in GGUF, alone and beside attention: their tensors' names, and their config values."""

from __future__ import annotations

import re

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    ATTENTION,
    BLOCK,
    OUTSIDE,
    PRE_NORMS,
    Architecture,
    Change,
    HFConfig,
    Tensors,
)
from lmstate.errors import ModelError

MOST = 2**24
BACKBONE = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
FINAL_LAYERNORM = {**OUTSIDE, "output_norm.weight": "model.final_layernorm.weight"}
FEED_FORWARD = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
GRANITE = {  # under the names of parts that a Hugging Face checkpoint has in one
    **ATTENTION,
    **PRE_NORMS,
    **{f"ffn_{part}{end}": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down") for end in ("", "_shexp")},
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
}


def _space(inside: str) -> dict[str, str]:
    """The layers of a state space mixer, of Mamba or Mamba-2, that Hugging Face calls `inside`."""
    names = {"in": "in_proj", "conv1d": "conv1d", "x": "x_proj", "dt": "dt_proj", "out": "out_proj", "norm": "norm"}
    norms = {f"{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")}
    return {f"ssm_{ours}": f"{inside}.{theirs}" for ours, theirs in (names | norms).items()}


def _space_whole(inside: str, *, heads: bool) -> dict[str, str]:
    """Names of the parameters that have no suffix; `heads`: of a Mamba-2."""
    names = {"ssm_a": f"{inside}.A_log", "ssm_d": f"{inside}.D"}
    return names | {"ssm_dt.bias": f"{inside}.dt_bias"} if heads else names


MAMBA_CHANGES: dict[str, Change] = {"conv1d.weight": "convolution", "A_log": "decay"}


def _mamba2_changes(inside: str) -> dict[str, Change]:
    return {"conv1d.weight": "convolution", "A_log": "decay vector", ".D": "vector", f"{inside}.norm.weight": "vector"}


def _mamba_config(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config |= {
        "layer_norm_epsilon": config["rms_norm_eps"],
        "state_size": metadata.int(f"{prefix}.ssm.state_size", 1, MOST),
        "conv_kernel": metadata.int(f"{prefix}.ssm.conv_kernel", 1, MOST),
        "time_step_rank": metadata.int(f"{prefix}.ssm.time_step_rank", 1, MOST),
        "intermediate_size": _inner(metadata, prefix),
    }
    if metadata.bool(f"{prefix}.ssm.dt_b_c_rms", default=False):
        # The epsilon of these norms is not in the file; the released Falcon-Mamba models have this one.
        config |= {"model_type": "falcon_mamba", "architectures": ["FalconMambaForCausalLM"], "mixer_rms_eps": 1e-6}


def _mamba2_config(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    heads, groups = _heads(metadata, prefix)
    config |= {
        "layer_norm_epsilon": config["rms_norm_eps"],
        "state_size": metadata.int(f"{prefix}.ssm.state_size", 1, MOST),
        "conv_kernel": metadata.int(f"{prefix}.ssm.conv_kernel", 1, MOST),
        "num_heads": heads,
        "head_dim": _inner(metadata, prefix) // heads,
        "n_groups": groups,
    }


def _jamba_config(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    layers, where = config["num_hidden_layers"], metadata.where
    attention = _every(layers_with("attn_q.weight", tensors), layers, "attention", where)
    experts = _every(layers_with("ffn_gate_exps.weight", tensors), layers, "experts", where)
    config |= {
        "mamba_d_state": metadata.int(f"{prefix}.ssm.state_size", 1, MOST),
        "mamba_d_conv": metadata.int(f"{prefix}.ssm.conv_kernel", 1, MOST),
        "mamba_dt_rank": metadata.int(f"{prefix}.ssm.time_step_rank", 1, MOST),
        "mamba_expand": _inner(metadata, prefix) / config["hidden_size"],
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": experts[0],
        "expert_layer_offset": experts[1],
        "num_experts": max(metadata.int(f"{prefix}.expert_count", 0, 4096, default=0), 1),
        "num_experts_per_tok": max(metadata.int(f"{prefix}.expert_used_count", 0, 4096, default=0), 1),
    }


def _granite_config(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Granite with state space layers, and without: there every layer is attention with rotary positions."""
    layers = config["num_hidden_layers"]
    spaces = layers_with("ssm_in.weight", tensors)
    experts = metadata.int(f"{prefix}.expert_count", 0, 4096, default=0)
    shared = tensors.get("blk.0.ffn_up_shexp.weight" if experts else "blk.0.ffn_up.weight")
    if shared is None and not (experts and prefix == "granitemoe"):
        raise ModelError(f"{metadata.where} has no shared feed-forward part in layer 0; the file is incomplete")
    if spaces:
        _bamba(metadata, prefix, config)
    rotary = metadata.bool(f"{prefix}.rope.scaling.finetuned", default=not spaces)
    config |= {
        "layer_types": ["mamba" if layer in spaces else "attention" for layer in range(layers)],
        "position_embedding_type": "rope" if rotary or not spaces else "nope",
        "shared_intermediate_size": 0 if shared is None else shared.shape[0],
        "num_local_experts": experts,
        "num_experts": experts,
        "num_experts_per_tok": metadata.int(f"{prefix}.expert_used_count", 0, 4096, default=0),
        "attention_multiplier": metadata.float(f"{prefix}.attention.scale", default=config["head_dim"] ** -0.5),
        "embedding_multiplier": metadata.float(f"{prefix}.embedding_scale", default=1.0),
        "residual_multiplier": metadata.float(f"{prefix}.residual_scale", default=1.0),
        "logits_scaling": metadata.float(f"{prefix}.logit_scale", default=1.0),
    }


def _falcon_h1_config(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Its multipliers are in the weights already."""
    _bamba(metadata, prefix, config)
    config["mamba_rms_norm"] = bool(layers_with("ssm_norm.weight", tensors))
    config["mamba_norm_before_gate"] = False


def _nemotron_h_config(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    heads, groups = _heads(metadata, prefix)
    parts = {
        "mamba": "ssm_in.weight",
        "attention": "attn_q.weight",
        "moe": "ffn_gate_inp.weight",
        "mlp": "ffn_up.weight",
    }
    kinds = {layer: kind for kind, name in parts.items() for layer in layers_with(name, tensors)}
    missing = [layer for layer in range(config["num_hidden_layers"]) if layer not in kinds]
    if missing:
        raise ModelError(f"{metadata.where} has nothing that lmstate knows in layer {missing[0]}")
    config |= {
        "layers_block_type": [kinds[layer] for layer in range(config["num_hidden_layers"])],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "ssm_state_size": metadata.int(f"{prefix}.ssm.state_size", 1, MOST),
        "conv_kernel": metadata.int(f"{prefix}.ssm.conv_kernel", 1, MOST),
        "mamba_num_heads": heads,
        "mamba_head_dim": _inner(metadata, prefix) // heads,
        "n_groups": groups,
        "mlp_hidden_act": "relu2",
    }
    experts = metadata.int(f"{prefix}.expert_count", 0, 4096, default=0)
    if experts:
        config |= {
            "num_experts": experts,
            "n_routed_experts": experts,
            "num_experts_per_tok": metadata.int(f"{prefix}.expert_used_count", 1, experts),
            "moe_intermediate_size": metadata.int(f"{prefix}.expert_feed_forward_length", 1, MOST),
            "moe_shared_expert_intermediate_size": metadata.int(f"{prefix}.expert_shared_feed_forward_length", 1, MOST),
            "moe_latent_size": metadata.int(f"{prefix}.moe_latent_size", 1, MOST, default=None),
            "norm_topk_prob": metadata.bool(f"{prefix}.expert_weights_norm", default=True),
            "routed_scaling_factor": metadata.float(f"{prefix}.expert_weights_scale", default=1.0),
        }


def layers_with(name: str, tensors: Tensors) -> list[int]:
    """The numbers of the blocks that have a tensor of this name, in order."""
    found = (re.fullmatch(BLOCK + re.escape(name), each) for each in tensors)
    return sorted(int(match[1]) for match in found if match)


def _bamba(metadata: Config, prefix: str, config: HFConfig) -> None:
    """Mamba-2 as Bamba's heirs name its sizes."""
    heads, groups = _heads(metadata, prefix)
    config |= {
        "mamba_n_heads": heads,
        "mamba_d_head": _inner(metadata, prefix) // heads,
        "mamba_d_state": metadata.int(f"{prefix}.ssm.state_size", 1, MOST),
        "mamba_d_conv": metadata.int(f"{prefix}.ssm.conv_kernel", 1, MOST),
        "mamba_n_groups": groups,
    }


def _inner(metadata: Config, prefix: str) -> int:
    return metadata.int(f"{prefix}.ssm.inner_size", 1, MOST)


def _heads(metadata: Config, prefix: str) -> tuple[int, int]:
    """Heads, which GGUF calls the time step's rank, and groups."""
    return (
        metadata.int(f"{prefix}.ssm.time_step_rank", 1, MOST),
        metadata.int(f"{prefix}.ssm.group_count", 1, MOST, default=1),
    )


def _every(found: list[int], layers: int, what: str, where: str) -> tuple[int, int]:
    """The period and offset by which a family's config places layers of a kind."""
    if not found:
        return layers + 1, layers
    period = found[1] - found[0] if len(found) > 1 else layers
    if found != list(range(found[0], layers, period)) or found[0] >= period:
        raise ModelError(f"{where} has {what} in layers {found[:8]} of {layers}, an irregular pattern")
    return period, found[0]


NEMOTRON_H = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    {
        **{f"attn_{ours}": f"mixer.{theirs}_proj" for ours, theirs in zip(("q", "k", "v", "output"), "qkvo")},
        **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
        **{f"ffn_{part}_exps": f"mixer.experts.{{expert}}.{part}_proj" for part in ("up", "down")},
        **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
        **_space("mixer"),
        "attn_norm": "norm",
        "ffn_gate_inp": "mixer.gate",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    extra=_nemotron_h_config,
    whole={**_space_whole("mixer", heads=True), "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    outside=BACKBONE,
    layers="backbone.layers",
    changed=_mamba2_changes("mixer"),
    hybrid=True,
)

HYBRIDS = {
    "mamba": Architecture(
        "mamba",
        "MambaForCausalLM",
        {"attn_norm": "norm", **_space("mixer")},
        extra=_mamba_config,
        also=("falcon_mamba",),
        whole=_space_whole("mixer", heads=False),
        outside=BACKBONE,
        layers="backbone.layers",
        changed=MAMBA_CHANGES,
        hybrid=True,
    ),
    "mamba2": Architecture(
        "mamba2",
        "Mamba2ForCausalLM",
        {"attn_norm": "norm", **_space("mixer")},
        extra=_mamba2_config,
        whole=_space_whole("mixer", heads=True),
        outside=BACKBONE,
        layers="backbone.layers",
        changed=_mamba2_changes("mixer"),
        hybrid=True,
    ),
    "jamba": Architecture(
        "jamba",
        "JambaForCausalLM",
        {
            **ATTENTION,
            **FEED_FORWARD,
            **_space("mamba"),
            **{f"ffn_{part}_exps": f"feed_forward.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
            "ffn_gate_inp": "feed_forward.router",
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm",
        },
        extra=_jamba_config,
        whole=_space_whole("mamba", heads=False),
        outside=FINAL_LAYERNORM,
        changed=MAMBA_CHANGES,
        hybrid=True,
    ),
    "granite": Architecture(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", GRANITE, paired=True, extra=_granite_config
    ),
    "granitemoe": Architecture(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", GRANITE, paired=True, extra=_granite_config
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        {**GRANITE, **_space("mamba")},
        paired=True,
        extra=_granite_config,
        whole=_space_whole("mamba", heads=True),
        changed=_mamba2_changes("mamba"),
        hybrid=True,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        "FalconH1ForCausalLM",
        {
            **ATTENTION,
            **FEED_FORWARD,
            **_space("mamba"),
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm",
        },
        extra=_falcon_h1_config,
        whole={**_space_whole("mamba", heads=True), "ffn_norm": "pre_ff_layernorm.weight"},
        outside=FINAL_LAYERNORM,
        changed=_mamba2_changes("mamba"),
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
}
