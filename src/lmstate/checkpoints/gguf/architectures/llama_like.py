"""Dense models in GGUF that are a family here under another name, or nearly: Llama's, GLM's, Granite's, GPT-2's."""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    ATTENTION,
    HEAD_NORMS,
    MLP,
    MOST_WIDTH,
    PRE_NORMS,
    STANDARD,
    Architecture,
    HFConfig,
    Tensors,
)
from lmstate.checkpoints.gguf.architectures.dense import BIASED_NORM, HUNYUAN, UNGATED, bias_flags, relu2
from lmstate.checkpoints.gguf.architectures.older import GPT2, gpt2

UNEVEN = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
}
FUSED = {"attn_qkv": "self_attn.{qkv}_proj"}


def _baichuan(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config["alibi"] = config["num_hidden_layers"] == 40  # as llama.cpp tells those of 13B


def _refact(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config["alibi"] = True


def _orion(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config |= {"use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False}


def _plamo(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    _orion(metadata, prefix, config, tensors)
    config |= {"use_parallel_residual": True, "norm_type": "rms", "layer_norm_eps": config["rms_norm_eps"]}


def _uneven(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Heads and widths of each layer; a file gives one number where they are the same in all."""
    layers = config["num_hidden_layers"]
    for name, key in UNEVEN.items():
        where = f"{prefix}.{key}"
        listed = isinstance(metadata.get(where), list)
        config[f"{name}_by_layer"] = (
            list(metadata.ints(where, layers, 0, MOST_WIDTH)) if listed else [config[name]] * layers
        )


def _qwen(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """The width in the file is that of gate and up together."""
    if (up := tensors.get("blk.0.ffn_up.weight")) is not None:
        config["intermediate_size"] = up.shape[0]


def _chatglm(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config["attention_bias"] = "blk.0.attn_qkv.bias" in tensors or "blk.0.attn_q.bias" in tensors


def _minicpm(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Files of 2024 leave the scales out; they are then those of the models of that time."""
    depth = config["num_hidden_layers"]
    config |= {
        "attention_multiplier": config["head_dim"] ** -0.5,
        "embedding_multiplier": metadata.float(f"{prefix}.embedding_scale", default=12.0),
        "residual_multiplier": metadata.float(f"{prefix}.residual_scale", default=1.4 / depth**0.5),
        "logits_scaling": metadata.float(f"{prefix}.logit_scale", default=config["hidden_size"] / 256),
    }


def _codeshell(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config |= {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None}


def _starcoder(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    gpt2(metadata, prefix, config, tensors)
    config |= {"multi_query": config["num_key_value_heads"] == 1, "activation_function": "gelu_pytorch_tanh"}


LLAMA_LIKE = {
    "baichuan": Architecture("llama", "LlamaForCausalLM", paired=True, extra=_baichuan),
    "chatglm": Architecture(
        "glm",
        "GlmForCausalLM",
        {**ATTENTION, **PRE_NORMS, **FUSED, "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        extra=_chatglm,
    ),
    "codeshell": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {**ATTENTION, **PRE_NORMS, **FUSED, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        extra=_codeshell,
        outside=BIASED_NORM,
        eps="norm_epsilon",
    ),
    "exaone": Architecture(
        "exaone",
        "ExaoneForCausalLM",
        {
            "attn_norm": "ln_1",
            "ffn_norm": "ln_2",
            **{f"attn_{part}": f"attn.attention.{part}_proj" for part in "qkv"},
            "attn_output": "attn.attention.out_proj",
            "ffn_gate": "mlp.c_fc_0",
            "ffn_up": "mlp.c_fc_1",
            "ffn_down": "mlp.c_proj",
        },
        outside={
            "token_embd.weight": "transformer.wte.weight",
            "output_norm.weight": "transformer.ln_f.weight",
            "output.weight": "lm_head.weight",
        },
        layers="transformer.h",
    ),
    "internlm2": Architecture("llama", "LlamaForCausalLM", paired=True, extra=bias_flags),
    "jais2": Architecture(
        "jais2",
        "Jais2ForCausalLM",
        {**ATTENTION, **PRE_NORMS, **UNGATED},
        extra=relu2,
        outside=BIASED_NORM,
        eps="layer_norm_eps",
    ),
    "maincoder": Architecture(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", HUNYUAN, paired=True, paired_norms=True, extra=bias_flags
    ),
    "minicpm": Architecture("granite", "GraniteForCausalLM", paired=True, extra=_minicpm),
    "orion": Architecture("stablelm", "StableLmForCausalLM", extra=_orion, outside=BIASED_NORM, eps="layer_norm_eps"),
    "paddleocr": Architecture("paddleocr_vl_text", "PaddleOCRVLForConditionalGeneration", extra=bias_flags),
    "pangu-embedded": Architecture("llama", "LlamaForCausalLM", extra=bias_flags),
    "deci": Architecture("llama", "LlamaForCausalLM", paired=True, extra=_uneven, hybrid=True, varied=True),
    "openelm": Architecture(
        "llama",
        "LlamaForCausalLM",
        {**STANDARD, **HEAD_NORMS, "attn_qkv": "self_attn.qkv_proj"},
        extra=_uneven,
        varied=True,
    ),
    "plamo": Architecture(
        "stablelm", "StableLmForCausalLM", {**ATTENTION, **MLP, "attn_norm": "input_layernorm"}, extra=_plamo
    ),
    "qwen": Architecture("qwen2", "Qwen2ForCausalLM", {**STANDARD, **FUSED}, extra=_qwen),
    "refact": Architecture("llama", "LlamaForCausalLM", extra=_refact),
    "starcoder": Architecture(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        GPT2.layer,
        extra=_starcoder,
        outside=GPT2.outside,
        layers=GPT2.layers,
        eps=GPT2.eps,
    ),
    "xverse": Architecture("llama", "LlamaForCausalLM", paired=True, extra=bias_flags),
}
