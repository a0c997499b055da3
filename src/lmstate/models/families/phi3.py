"""Phi-3 and Phi-4-mini: Llama's block with its projections already fused in the checkpoint, and LongRoPE."""

from __future__ import annotations

from lmstate.models.decoder import Block, Model
from lmstate.models.families.common import MOST, Shape, activation, decoder, fused_mlp, norm
from lmstate.models.mixers.attention import Attention
from lmstate.models.rope import make_rope
from lmstate.models.weights.weights import Weights


def build(w: Weights) -> Model:
    config, shape = w.config, Shape.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    window = config.int("sliding_window", low=1, default=None)
    rope = make_rope(config, shape.head_dim).to(w.device)
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            Attention(
                w.linear(f"{layer}.self_attn.qkv_proj.weight", shape=(width + 2 * kv_width, shape.hidden)),
                w.linear(f"{layer}.self_attn.o_proj.weight", shape=(shape.hidden, width)),
                shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, rope, window,
            ),
            fused_mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )  # fmt: skip

    return decoder(w, shape, block)
