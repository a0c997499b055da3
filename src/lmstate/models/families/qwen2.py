"""Qwen2: Llama's block with biases on the query, key and value projections; some layers may slide."""

from __future__ import annotations

from lmstate.models.decoder import Block, Model
from lmstate.models.families.common import MOST, Shape, activation, attention, decoder, mlp, norm, windows
from lmstate.models.rope import make_rope
from lmstate.models.weights.weights import Weights


def build(w: Weights) -> Model:
    config, shape = w.config, Shape.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), windows(config, shape.layers)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            attention(w, f"{layer}.self_attn", shape, rope, window=window[index]),
            mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )

    return decoder(w, shape, block)
