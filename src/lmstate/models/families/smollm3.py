"""SmolLM3: Llama's block, where every few layers have no rotary positions (Yang et al. 2025, RNoPE).

x = embed(tokens)
x = x + attention(norm(x))    # some layers without positions
x = x + mlp(norm(x))
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {"smollm3": {"use_sliding_window": False, "rope_theta": 2e6}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    every = config.int("no_rope_layer_interval", low=1, default=4)
    rotates = config.ints("no_rope_layers", length=shape.layers, default=None)
    rotates = rotates or tuple(int((index + 1) % every != 0) for index in range(shape.layers))
    rope = make_rope(config, shape.head_dim).to(w.device)
    if config.given("layer_types"):  # which count whatever the switch says
        window = b.layer_windows(config, shape.layers, switch=False)
    else:
        size = b.config_window(config, switch=True)
        window = [None if rotates[index] else size for index in range(shape.layers)]

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            b.attention(w, f"{layer}.self_attn", shape, rope if rotates[index] else None, window=window[index]),
            b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            b.norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            b.norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )

    return b.decoder(w, shape, block)
