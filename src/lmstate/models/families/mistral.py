"""Mistral (Jiang et al. 2023) and Mixtral: Llama's block with a window on every layer; Mixtral's experts are chosen."""

from __future__ import annotations

from lmstate.models.decoder import Block, Model
from lmstate.models.families.common import (
    MOST,
    Shape,
    activation,
    attention,
    decoder,
    expert_count,
    experts,
    mlp,
    norm,
    one_window,
    windows,
)
from lmstate.models.mlp import FeedForward
from lmstate.models.moe import MixtureOfExperts, Router
from lmstate.models.rope import make_rope
from lmstate.models.weights.weights import Weights
from lmstate.ops import FloatWeight


def build(w: Weights) -> Model:
    config, shape = w.config, Shape.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), [one_window(config, switch=False)] * shape.layers
    if config.str("model_type") == "mistral" and config.given("layer_types"):  # Ministral, under the older name
        window = windows(config, shape.layers)
    count = expert_count(config)

    def feed_forward(layer: str) -> FeedForward:
        if not count:
            return mlp(w, f"{layer}.mlp", shape.hidden, inner, act)
        prefix = f"{layer}.block_sparse_moe"
        if not w.has(f"{prefix}.gate.weight"):
            prefix = f"{layer}.mlp"
        gate = FloatWeight(w.tensor(f"{prefix}.gate.weight", (count, shape.hidden)))
        return MixtureOfExperts(
            Router(gate, config.int("num_experts_per_tok", low=1, high=count), normalise=True),
            experts(w, f"{prefix}.experts", count, shape.hidden, inner, act),
        )

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            attention(w, f"{layer}.self_attn", shape, rope, window=window[index]),
            feed_forward(layer),
            norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )

    return decoder(w, shape, block)
