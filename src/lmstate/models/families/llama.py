"""Llama (Touvron et al. 2023) and the checkpoints that are exactly alike: SmolLM2, Yi, DeepSeek-LLM, ...

x = embed(tokens)
x = x + attention(norm(x))             # rotary, grouped keys and values
x = x + down(silu(gate(y)) * up(y))    # y = norm(x)
logits = head(norm(x))

Families that differ by a line are here too: ERNIE 4.5 and Helium rotate neighboring features, Seed-OSS says of each
part by itself whether it has biases, and the feed-forward part of Arcee has no gate. Llama 3.2 Vision has blocks that
attend to pictures, which do nothing in a text.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.block import Block
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.picture_attention import PictureAttention
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "arcee": {**b.EPS, "hidden_act": "relu2"},
    "emu3_text_model": {
        **b.EPS,
        "vocab_size": 184_622,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
    },
    "ernie4_5": {
        **b.EPS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "helium": {"rms_norm_eps": 1e-8, "head_dim": 128, "rope_theta": 100_000.0},
    "internlm3": {**b.EPS, "num_key_value_heads": 2, "head_dim": 128},
    "iquestcoder": {**b.EPS, "num_key_value_heads": 8, "head_dim": 128},
    "llama": b.LLAMA,
    "mllama_text_model": {
        **b.EPS,
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500_000.0,
        "cross_attention_layers": (3, 8, 13, 18, 23, 28, 33, 38),
    },
    "paddleocr_vl_text": {
        **b.EPS,
        "vocab_size": 103_424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
}

NEIGHBOURS = ("ernie4_5", "helium")
MARKS = 8  # of pictures: rows of the embedding of Llama 3.2 Vision past the vocabulary, which no answer has
# Whose fields for the biases of q, k and v, of the projection after attention, and of the feed-forward part differ.
BIASES = {
    "ernie4_5": ("use_bias", "use_bias", "use_bias"),
    "helium": ("attention_bias", None, "mlp_bias"),
    "internlm3": ("qkv_bias", "bias", "bias"),
    "paddleocr_vl_text": ("use_bias", "use_bias", "use_bias"),
    "seed_oss": ("attention_bias", "attention_out_bias", "mlp_bias"),
}


def build(w: WeightLoader) -> Model:
    """Pre-norm blocks of rotary attention and a feed-forward part. Qwen2 differs by its biases alone."""
    if w.config.given("num_attention_heads_by_layer"):  # in a GGUF of DeciLM or OpenELM
        return b.uneven_llama(w)
    config, shape = w.config, b.Dims.of(w.config)
    family = config.str("model_type")
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope = make_rope(config, shape.head_dim, interleaved=family in NEIGHBOURS).to(w.device)
    falls = config.bool("alibi", default=False)  # in a GGUF of Baichuan or Refact
    slopes = b.alibi_slopes(shape.heads).to(w.device) if falls else None
    qkv, out, inside = (_says(config, name) for name in BIASES.get(family, ("attention_bias",) * 2 + ("mlp_bias",)))

    def mixer(_: int, name: str) -> Attention:
        made = b.attention(w, name, shape, None if falls else rope, biased=qkv, out_biased=out)
        return replace(made, slopes=slopes) if falls else made

    made = b.ungated_mlp if family == "arcee" else b.mlp
    block = b.pre_norm(
        b.rms_norms(w, shape),
        mixer,
        lambda _, name: made(w, name, shape.hidden, inner, act, biased=inside),
    )
    if family != "mllama_text_model":
        return b.decoder(w, shape, block)
    seeing = config.ints("cross_attention_layers", default=())

    def seen(index: int) -> Block:
        name = f"model.layers.{index}"
        mlp = b.mlp(w, f"{name}.mlp", shape.hidden, inner, act)
        return Block(_picture_attention(w, name, shape, mlp), None, b.rms_norms(w, shape)(f"{name}.input_layernorm"))

    return b.decoder(w, shape, lambda index: (seen if index in seeing else block)(index), marks=MARKS)


def _picture_attention(w: WeightLoader, name: str, shape: b.Dims, mlp: MLP) -> PictureAttention:
    normed = b.rms_norms(w, shape)
    plain = b.cross_attention(
        w, f"{name}.cross_attn", shape, names=("q_proj", "k_proj", "v_proj", "o_proj"), biased=False
    )
    q_norm, k_norm = b.head_norms(w, f"{name}.cross_attn", shape)
    gate, mlp_gate = (torch.tanh(w.tensor(f"{name}.cross_attn_{part}_gate", (1,))) for part in ("attn", "mlp"))
    return PictureAttention(
        plain.queries, plain.kv, plain.out, shape.heads, shape.kv_heads, shape.head_dim, q_norm, k_norm, gate,
        mlp, normed(f"{name}.post_attention_layernorm"), mlp_gate,
    )  # fmt: skip


def _says(config: Config, name: str | None) -> bool:
    return name is not None and config.bool(name, default=False)
