"""Mistral (Jiang et al. 2023) and Mixtral: Llama's block with a window on every layer; Mixtral's experts are chosen.

Ministral has windows on some layers. The queries of Ministral 3 grow with their position.
"""

from __future__ import annotations

from dataclasses import replace

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
from lmstate.models.mixers.attention import Temperature
from lmstate.models.mlp import FeedForward
from lmstate.models.moe import MixtureOfExperts, Router
from lmstate.models.rope import make_rope, rope_fields
from lmstate.models.weights.fields import Fields
from lmstate.models.weights.weights import Weights
from lmstate.ops import FloatWeight


def build(w: Weights) -> Model:
    config, shape = w.config, Shape.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), [one_window(config, switch=False)] * shape.layers
    if config.str("model_type") in ("mistral", "ministral") and config.given("layer_types"):
        window = windows(config, shape.layers)  # Ministral, under the older name too
    temperature = temperature_of(rope_fields(config)) if config.str("model_type") == "ministral3" else None
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
            replace(attention(w, f"{layer}.self_attn", shape, rope, window=window[index]), temperature=temperature),
            feed_forward(layer),
            norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )

    return decoder(w, shape, block)


def temperature_of(rope: Fields) -> Temperature | None:
    """How queries grow past each multiple of the length that the model was made for."""
    strength = rope.float("llama_4_scaling_beta", low=0.0, default=None)
    if strength is None:
        return None
    return Temperature(rope.int("original_max_position_embeddings", low=1), strength, first=0)
