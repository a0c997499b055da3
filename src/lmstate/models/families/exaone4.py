"""EXAONE 4 (2507.11407): norms after each part and on every head; if there are windows, only those know positions.

x = embed(tokens)
x = x + norm(attention(x))    # queries and keys normalized head by head
x = x + norm(mlp(x))
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {
    "exaone4": {
        **b.EPS,
        "vocab_size": 102_400,
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "sliding_window": 4096,
    }
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, normed = make_rope(config, shape.head_dim).to(w.device), b.rms_norms(w, shape)
    window = b.layer_windows(config, shape.layers, full_every=4)
    everywhere = config.get("sliding_window") is None

    def block(index: int) -> Block:
        layer, size = f"model.layers.{index}", window[index]
        q_norm, k_norm = b.head_norms(w, f"{layer}.self_attn", shape)
        turns = rope if everywhere or size is not None else None
        return Block(
            b.attention(w, f"{layer}.self_attn", shape, turns, window=size, q_norm=q_norm, k_norm=k_norm),
            b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            mixer_post_norm=normed(f"{layer}.post_attention_layernorm"),
            mlp_post_norm=normed(f"{layer}.post_feedforward_layernorm"),
        )

    return b.decoder(w, shape, block)
