"""Command R7B (Cohere 2): attention and feed-forward side by side, positions only where there is a window."""

from __future__ import annotations

from lmstate.models.decoder import Block, Model
from lmstate.models.families.common import MOST, Shape, activation, attention, decoder, mlp, windows
from lmstate.models.rope import make_rope
from lmstate.models.weights.weights import Weights
from lmstate.ops import Norm


def build(w: Weights) -> Model:
    config, shape = w.config, Shape.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    eps = config.float("layer_norm_eps", low=0.0, high=1.0, default=1e-5)
    rope, window = (
        make_rope(config, shape.head_dim, interleaved=True).to(w.device),
        windows(config, shape.layers, full_every=4),
    )

    def layer_norm(name: str) -> Norm:
        return Norm(w.tensor(name, (shape.hidden,)), eps, "layer")

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        both = layer_norm(f"{layer}.input_layernorm.weight")
        size = window[index]
        return Block(
            attention(w, f"{layer}.self_attn", shape, None if size is None else rope, window=size),
            mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            both,
            both,
            parallel=True,
        )

    return decoder(
        w,
        shape,
        block,
        final_norm=layer_norm("model.norm.weight"),
        logit_scale=config.float("logit_scale", default=0.0625),
    )
