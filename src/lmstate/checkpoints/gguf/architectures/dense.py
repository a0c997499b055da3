"""Dense models beside Llama's in GGUF: norms of other kinds and places, biases, and parts without a gate."""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    ATTENTION,
    HEAD_NORMS,
    MLP,
    OUTSIDE,
    PRE_NORMS,
    STANDARD,
    Architecture,
    Change,
    HFConfig,
    Tensors,
    layer_kinds,
)
from lmstate.errors import ModelError

UNGATED = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
BIASED_NORM = {**OUTSIDE, "output_norm.bias": "model.norm.bias"}
PHI_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    **{f"output_norm.{part}": f"model.final_layernorm.{part}" for part in ("weight", "bias")},
    **{f"output.{part}": f"lm_head.{part}" for part in ("weight", "bias")},
}
HUNYUAN = {**STANDARD, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
ONE_MORE: dict[str, Change] = {"norm.weight": "one more"}


def bias_flags(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Bias flags of the config, from the tensors that are there."""
    config |= {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "use_bias": "blk.0.attn_q.bias" in tensors,
    }


def relu2(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    bias_flags(metadata, prefix, config, tensors)
    config["hidden_act"] = "relu2"


def _gemma(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config["hidden_act"] = "gelu_pytorch_tanh"


def _phi(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    if "blk.0.attn_qkv.weight" in tensors:
        raise ModelError(
            f"{metadata.where} was made from a Phi of 2023, whose queries, keys and values are one matrix, which "
            f"lmstate cannot read; take a file made since"
        )
    config["hidden_act"] = "gelu_new"


def _glm4(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    if metadata.given(f"{prefix}.rope.dimension_sections"):
        raise ModelError(f"{metadata.where} is the text model of GLM-4V, whose heads lie otherwise; lmstate has none")
    bias_flags(metadata, prefix, config, tensors)


def _exaone4(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config["sliding_window"] = metadata.int(f"{prefix}.attention.sliding_window", 1, default=None)
    config["layer_types"] = layer_kinds(metadata, prefix, config["num_hidden_layers"])


def _command_r(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    bias_flags(metadata, prefix, config, tensors)
    config["logit_scale"] = metadata.float(f"{prefix}.logit_scale", default=0.0625)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors


def _muse_glimmer(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Layers without a window know no positions. The factor of queries is in their norm."""
    layers = config["num_hidden_layers"]
    kinds = layer_kinds(metadata, prefix, layers)
    if kinds is None:
        raise ModelError(f"{metadata.where} does not list which of its {layers} layers have a window; it is damaged")
    config |= {
        "layer_types": kinds,
        "layer_rope_theta": [config["rope_theta"] if kind == "sliding_attention" else 0.0 for kind in kinds],
        "sliding_window": metadata.int(f"{prefix}.attention.sliding_window", 1),
        "final_logit_softcapping": metadata.float(f"{prefix}.final_logit_softcapping", 1e-6, default=None),
        "output_multiplier": metadata.float(f"{prefix}.logit_scale"),
        "qk_scale_factor": 1.0,
    }


def _olmo(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config["clip_qkv"] = metadata.float(f"{prefix}.attention.clamp_kqv", 0.0, default=0.0) or None


def _mistral3(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config["sliding_window"] = metadata.int(f"{prefix}.attention.sliding_window", 1, default=None)
    scaling = config.get("rope_scaling")
    if scaling is None:
        config["rope_scaling"] = {"rope_type": "default"}  # and not what the published models have
    elif scaling["rope_type"] == "yarn":
        scaling["attention_factor"] = 1.0
        strength = metadata.float(f"{prefix}.attention.temperature_scale", 0.0, default=None)
        if strength:
            scaling["llama_4_scaling_beta"] = strength


def _apertus(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    bias_flags(metadata, prefix, config, tensors)
    config["hidden_act"] = "xielu"
    # The learned numbers of each layer's activation, which are tensors elsewhere.
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        config[f"xielu_{name}"] = metadata.get(f"xielu.{name}")
    config.setdefault("rope_scaling", {"rope_type": "default"})  # and not what the published models have


def _stablelm(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config |= {
        "use_qkv_bias": "blk.0.attn_q.bias" in tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
    }


DENSE = {
    "bitnet": Architecture(
        "bitnet",
        "BitNetForCausalLM",
        {**STANDARD, "attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
    ),
    "apertus": Architecture(
        "apertus",
        "ApertusForCausalLM",
        {
            **ATTENTION,
            **HEAD_NORMS,
            **UNGATED,
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
        },
        extra=_apertus,
    ),
    "arcee": Architecture("arcee", "ArceeForCausalLM", {**ATTENTION, **PRE_NORMS, **UNGATED}, paired=True, extra=relu2),
    "command-r": Architecture(
        "cohere",
        "CohereForCausalLM",
        {**ATTENTION, **MLP, **HEAD_NORMS, "attn_norm": "input_layernorm"},
        extra=_command_r,
        eps="layer_norm_eps",
    ),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", extra=bias_flags),
    "exaone4": Architecture(
        "exaone4", "Exaone4ForCausalLM", {**ATTENTION, **MLP, **HEAD_NORMS, **AFTER}, extra=_exaone4
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", extra=_gemma, changed=ONE_MORE),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        {
            **ATTENTION,
            **PRE_NORMS,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        extra=_glm4,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", HUNYUAN, extra=bias_flags),
    "hunyuan_vl": Architecture("hunyuan_vl_text", "HunYuanVLForConditionalGeneration", HUNYUAN, extra=bias_flags),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", paired=True, extra=_mistral3),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        {**ATTENTION, **PRE_NORMS, **UNGATED},
        extra=relu2,
        outside=BIASED_NORM,
        changed=ONE_MORE,
        eps="norm_eps",
    ),
    "muse-glimmer": Architecture(
        "muse_glimmer_text",
        "MuseGlimmerForConditionalGeneration",
        {
            **STANDARD,
            **HEAD_NORMS,
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        paired=True,
        extra=_muse_glimmer,
        changed={"layernorm.weight": "one more"},
    ),
    "olmo": Architecture(
        "olmo", "OlmoForCausalLM", {**ATTENTION, **MLP}, paired=True, extra=_olmo, eps="layer_norm_eps"
    ),
    "phi2": Architecture(
        "phi",
        "PhiForCausalLM",
        {
            **ATTENTION,
            "attn_output": "self_attn.dense",
            "attn_norm": "input_layernorm",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        extra=_phi,
        outside=PHI_OUTSIDE,
        eps="layer_norm_eps",
    ),
    "qwen2vl": Architecture("qwen2_vl_text", "Qwen2VLForConditionalGeneration"),
    "qwen3vl": Architecture(
        "qwen3_vl_text", "Qwen3VLForConditionalGeneration", {**STANDARD, **HEAD_NORMS}, extra=bias_flags
    ),
    "seed_oss": Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        {**ATTENTION, **MLP, "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
        extra=bias_flags,
    ),
    "stablelm": Architecture(
        "stablelm",
        "StableLmForCausalLM",
        {**STANDARD, "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
        extra=_stablelm,
        outside=BIASED_NORM,
        eps="layer_norm_eps",
    ),
}
