"""GLM-4 (2406.12793), and GLM-4-0414 with norms after each part too: half of each head rotates, by neighbors.

x = embed(tokens)
x = x + attention(norm(x))    # 0414: norm(attention(norm(x)))
x = x + mlp(norm(x))          # 0414: norm(mlp(norm(x)))
logits = head(norm(x))

The text parts of GLM-4.1V and GLM-OCR are like the latter.
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope, position_axes
from lmstate.models.model import Block, Model

GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
DEFAULTS: b.Defaults = {
    "glm": GLM,
    "glm4": GLM,
    "glm4v_text": {
        **b.EPS,
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "attention_bias": True,
    },
    "glm_ocr_text": {
        **b.EPS,
        "vocab_size": 59_392,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, normed = make_rope(config, shape.head_dim, interleaved=True).to(w.device), b.rms_norms(w, shape)
    family = config.str("model_type")
    sandwich = family != "glm"
    if family in ("glm4v_text", "glm_ocr_text"):
        rope = replace(rope, axes=position_axes(config, len(rope.frequencies), (8, 12, 12)))

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            b.attention(w, f"{layer}.self_attn", shape, rope, out_biased=False),
            b.fused_mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            normed(f"{layer}.post_self_attn_layernorm") if sandwich else None,
            normed(f"{layer}.post_mlp_layernorm") if sandwich else None,
        )

    return b.decoder(w, shape, block, ignore=b.mtp_tensors(config, shape))
