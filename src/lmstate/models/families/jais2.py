"""Jais 2 (Inception): layer norms, biases everywhere, and a feed-forward part without a gate.

x = embed(tokens)
x = x + attention(norm(x))          # rotary, grouped keys and values
x = x + down(relu2(up(norm(x))))
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"jais2": {**b.LAYER_NORM_EPS, "attention_bias": True, "mlp_bias": True, "hidden_act": "relu2"}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config, eps="layer_norm_eps")
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, normed = make_rope(config, shape.head_dim).to(w.device), b.layer_norms(w, shape)
    block = b.pre_norm(
        normed,
        lambda _, name: b.attention(w, name, shape, rope),
        lambda _, name: b.ungated_mlp(w, name, shape.hidden, inner, act),
    )
    return b.decoder(w, shape, block, final_norm=normed("model.norm"))
