"""Nemotron-4 and Minitron (2402.16819): layer norms that are stored less 1, no gate, half of each head rotates.

x = embed(tokens)
x = x + attention(norm(x))
x = x + down(relu2(up(norm(x))))
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"nemotron": {"norm_eps": 1e-5, "partial_rotary_factor": 0.5}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config, eps="norm_eps")
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config, default="relu2")
    rope, normed = make_rope(config, shape.head_dim).to(w.device), b.layer_norms(w, shape, plus_one=True)
    block = b.pre_norm(
        normed,
        lambda _, name: b.attention(w, name, shape, rope),
        lambda _, name: b.ungated_mlp(w, name, shape.hidden, inner, act),
    )
    return b.decoder(w, shape, block, final_norm=normed("model.norm"))
