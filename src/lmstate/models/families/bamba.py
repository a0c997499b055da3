"""Bamba: Mamba-2 and, in a few layers, attention of which half of each head rotates.

x = embed(tokens)
x = x + mixer(norm(x))    # Mamba-2, or attention
x = x + mlp(norm(x))
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {"bamba": b.EPS}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    sizes = b.Mamba2Shape.of(config, shape)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope = make_rope(config, shape.head_dim, fraction=0.5).to(w.device)
    attentive = config.ints("attn_layer_indices", default=()) or ()

    def mixer(index: int, layer: str) -> Mixer:
        if index in attentive:
            return b.attention(w, f"{layer}.self_attn", shape, rope)
        gated = b.gated_norm(w, f"{layer}.mamba.norm.weight", sizes)
        return b.mamba2(w, f"{layer}.mamba", sizes, shape.hidden, norm=gated)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, layer),
            b.mlp(w, f"{layer}.feed_forward", shape.hidden, inner, act),
            b.norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            b.norm(w, f"{layer}.pre_ff_layernorm.weight", shape.hidden, shape.eps),
        )

    return b.decoder(w, shape, block, final_norm=b.norm(w, "model.final_layernorm.weight", shape.hidden, shape.eps))
