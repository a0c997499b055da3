"""Bamba: Mamba-2 and, in a few layers, attention of which half of each head rotates."""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.attention import attention
from lmstate.models.families.builders.decoder import decoder
from lmstate.models.families.builders.defaults import EPS, Defaults
from lmstate.models.families.builders.dims import MOST, Dims
from lmstate.models.families.builders.mamba import Mamba2Shape, gated_norm, mamba2
from lmstate.models.families.builders.mlp import activation, mlp
from lmstate.models.families.builders.norms import norm
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: Defaults = {"bamba": EPS}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, Dims.of(w.config)
    sizes = Mamba2Shape.of(config, shape)
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    rope = make_rope(config, shape.head_dim, fraction=0.5).to(w.device)
    attentive = config.ints("attn_layer_indices", default=()) or ()

    def mixer(index: int, layer: str) -> Mixer:
        if index in attentive:
            return attention(w, f"{layer}.self_attn", shape, rope)
        gated = gated_norm(w, f"{layer}.mamba.norm.weight", sizes)
        return mamba2(w, f"{layer}.mamba", sizes, shape.hidden, norm=gated)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, layer),
            mlp(w, f"{layer}.feed_forward", shape.hidden, inner, act),
            norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            norm(w, f"{layer}.pre_ff_layernorm.weight", shape.hidden, shape.eps),
        )

    return decoder(w, shape, block, final_norm=norm(w, "model.final_layernorm.weight", shape.hidden, shape.eps))
