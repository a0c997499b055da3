"""Lara Mini (Translated): the gated delta rule, windows and whole attention by turns, and experts beside a shared one.

x = embed(tokens)
x = x + mixer(norm(x))                                      # the gated delta rule, or attention
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x)
logits = head(norm(x))

Layers without a window know no positions.
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.families.flint import ungated_shared
from lmstate.models.families.qwen3_next import delta
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {
    "lara_mini": {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
}
L, S, F = "linear_attention", "sliding_attention", "full_attention"
PATTERN = (L, S, L, F, S)


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    rope, size = make_rope(config, shape.head_dim).to(w.device), config.int("sliding_window", low=1)
    kinds = config.strs("layer_types", shape.layers, (L, S, F), default=None) or [
        PATTERN[index % len(PATTERN)] for index in range(shape.layers)
    ]
    normed = b.rms_norms(w, shape)

    def mixer(index: int, layer: str) -> Mixer:
        if kinds[index] == L:
            return delta(w, f"{layer}.linear_attn", shape)
        name, slides = f"{layer}.self_attn", kinds[index] == S
        q_norm, k_norm = b.head_norms(w, name, shape)
        return b.attention(
            w, name, shape, rope if slides else None, window=size if slides else None, q_norm=q_norm, k_norm=k_norm
        )

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, layer),
            ungated_shared(w, f"{layer}.mlp", shape, "softmax", normalize=True),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
        )

    return b.decoder(w, shape, block)
