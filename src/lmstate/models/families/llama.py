"""Llama (Touvron et al. 2023) and the checkpoints that are exactly alike: SmolLM2, Yi, DeepSeek-LLM, ..."""

from __future__ import annotations

from lmstate.models.decoder import Block, Model
from lmstate.models.families.common import MOST, Shape, activation, attention, decoder, mlp, norm
from lmstate.models.rope import make_rope
from lmstate.models.weights.weights import Weights


def build(w: Weights) -> Model:
    """Pre-norm blocks of rotary attention and a gated feed-forward part. Qwen2 differs by its biases alone."""
    config, shape = w.config, Shape.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    rope = make_rope(config, shape.head_dim).to(w.device)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            attention(w, f"{layer}.self_attn", shape, rope),
            mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )

    return decoder(w, shape, block)
