"""SmolLM3: Llama's block, where every few layers have no rotary positions (Yang et al. 2025, RNoPE)."""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.attention import attention
from lmstate.models.families.builders.decoder import decoder
from lmstate.models.families.builders.defaults import Defaults
from lmstate.models.families.builders.dims import MOST, Dims, windows
from lmstate.models.families.builders.mlp import activation, mlp
from lmstate.models.families.builders.norms import norm
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: Defaults = {"smollm3": {"use_sliding_window": False, "rope_theta": 2e6}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    every = config.int("no_rope_layer_interval", low=1, default=4)
    rotates = config.ints("no_rope_layers", length=shape.layers, default=None)
    rotates = rotates or tuple(int((index + 1) % every != 0) for index in range(shape.layers))
    rope, window = make_rope(config, shape.head_dim).to(w.device), windows(config, shape.layers)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            attention(w, f"{layer}.self_attn", shape, rope if rotates[index] else None, window=window[index]),
            mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )

    return decoder(w, shape, block)
