"""Models of before gates and RMS norms were usual: GPT-2, GPT-NeoX, Falcon, BLOOM, MPT, StarCoder 2; JAIS, Cohere 2.

The converter puts queries, keys and values of all heads one after the other, and turns GPT-2's matrices round.
"""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import ATTENTION, MLP, OUTSIDE, PRE_NORMS, Architecture, HFConfig, Tensors

PARTS = ("weight", "bias")


def gpt2(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config |= {
        "n_inner": config["intermediate_size"],
        "n_positions": config["max_position_embeddings"],
        "activation_function": "gelu_new",
        "conv1d": False,
    }


def _gpt_neox(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config |= {
        "hidden_act": "gelu",
        "attention_bias": "blk.0.attn_qkv.bias" in tensors,
        "use_parallel_residual": metadata.bool(f"{prefix}.use_parallel_residual", default=True),
        "rotary_pct": config["partial_rotary_factor"],
        "rotary_emb_base": config["rope_theta"],
        "qkv_grouped": False,
    }


def _falcon(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    kv_heads, two_norms = config["num_key_value_heads"], "blk.0.attn_norm_2.weight" in tensors
    config |= {
        "new_decoder_architecture": two_norms or kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "ffn_hidden_size": config["intermediate_size"],
        "bias": "blk.0.attn_qkv.bias" in tensors,
        "qkv_grouped": False,
    }


def _bloom(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config["qkv_grouped"] = False


def _jais(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    config |= {
        "qkv_grouped": False,
        "embedding_norm": False,
        "gated_size": config["intermediate_size"],
        "attention_scale": 1.0 / config["head_dim"],
        "alibi_bias_max": metadata.float(f"{prefix}.attention.max_alibi_bias", 0.0, 1024.0, default=8.0),
    }


def _mpt(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    most = metadata.float(f"{prefix}.attention.max_alibi_bias", 0.0, 1024.0, default=0.0)
    config["attn_config"] = {
        "alibi": most > 0.0,
        "alibi_bias_max": most,
        "clip_qkv": metadata.float(f"{prefix}.attention.clamp_kqv", 0.0, default=None),
    }


def _starcoder2(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    # Files do not give the window; the published models have this one.
    window = metadata.int(f"{prefix}.attention.sliding_window", 1, default=4096)
    config |= {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": "blk.0.attn_q.bias" in tensors,
        "sliding_window": window,
    }


def _cohere2(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    kinds = [
        "sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(config["num_hidden_layers"])
    ]
    config |= {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "logit_scale": metadata.float(f"{prefix}.logit_scale", default=0.0625),
        "sliding_window": metadata.int(f"{prefix}.attention.sliding_window", 1),
        "layer_types": kinds,
    }


GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    extra=gpt2,
    outside={
        "token_embd.weight": "transformer.wte.weight",
        "position_embd.weight": "transformer.wpe.weight",
        **{f"output_norm.{part}": f"transformer.ln_f.{part}" for part in PARTS},
        "output.weight": "lm_head.weight",
    },
    layers="transformer.h",
    eps="layer_norm_epsilon",
)

OLDER = {
    "bloom": Architecture(
        "bloom",
        "BloomForCausalLM",
        {
            **PRE_NORMS,
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        extra=_bloom,
        outside={
            "token_embd.weight": "transformer.word_embeddings.weight",
            **{f"token_embd_norm.{part}": f"transformer.word_embeddings_layernorm.{part}" for part in PARTS},
            **{f"output_norm.{part}": f"transformer.ln_f.{part}" for part in PARTS},
            "output.weight": "lm_head.weight",
        },
        layers="transformer.h",
        eps="layer_norm_epsilon",
    ),
    "cohere2": Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        {**ATTENTION, **MLP, "attn_norm": "input_layernorm"},
        extra=_cohere2,
        eps="layer_norm_eps",
    ),
    "falcon": Architecture(
        "falcon",
        "FalconForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_norm_2": "ln_attn",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        extra=_falcon,
        outside={
            "token_embd.weight": "transformer.word_embeddings.weight",
            **{f"output_norm.{part}": f"transformer.ln_f.{part}" for part in PARTS},
            "output.weight": "lm_head.weight",
        },
        layers="transformer.h",
        eps="layer_norm_epsilon",
    ),
    "gpt2": GPT2,
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {
            **PRE_NORMS,
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        extra=_gpt_neox,
        outside={
            "token_embd.weight": "gpt_neox.embed_in.weight",
            **{f"output_norm.{part}": f"gpt_neox.final_layer_norm.{part}" for part in PARTS},
            "output.weight": "lm_head.weight",
        },
        layers="gpt_neox.layers",
        eps="layer_norm_eps",
    ),
    "jais": Architecture(
        "bloom",
        "BloomForCausalLM",
        {
            **PRE_NORMS,
            **MLP,
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
        },
        extra=_jais,
        outside={
            "token_embd.weight": "transformer.word_embeddings.weight",
            **{f"output_norm.{part}": f"transformer.ln_f.{part}" for part in PARTS},
            "output.weight": "lm_head.weight",
        },
        layers="transformer.h",
        eps="layer_norm_epsilon",
    ),
    "mpt": Architecture(
        "mpt",
        "MptForCausalLM",
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        extra=_mpt,
        outside={
            "token_embd.weight": "transformer.wte.weight",
            "output_norm.weight": "transformer.norm_f.weight",
            "output.weight": "lm_head.weight",
        },
        layers="transformer.blocks",
        eps="layer_norm_epsilon",
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {**ATTENTION, **PRE_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        extra=_starcoder2,
        outside={**OUTSIDE, "output_norm.bias": "model.norm.bias"},
        eps="norm_epsilon",
    ),
}
