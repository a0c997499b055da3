"""HyperCLOVA X SEED Think (NAVER): Granite's scaled parts, with a norm after each of them too.

x = embed(tokens) * embedding_multiplier
x = x + post_norm1(attention(norm(x))) * residual_multiplier
x = x + post_norm2(mlp(norm(x))) * residual_multiplier
logits = head(norm(x)) * logits_scaling    # which Granite divides by
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {"hyperclovax": {"use_post_norm": True}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, normed = make_rope(config, shape.head_dim).to(w.device), b.rms_norms(w, shape)
    scale = config.float("attention_multiplier", default=shape.head_dim**-0.5)
    post_normed = config.bool("use_post_norm", default=True)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            b.attention(w, f"{layer}.self_attn", shape, rope, scale=scale),
            b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            normed(f"{layer}.post_norm1") if post_normed else None,
            normed(f"{layer}.post_norm2") if post_normed else None,
            scale=config.float("residual_multiplier", default=1.0),
        )

    return b.decoder(
        w,
        shape,
        block,
        embed_scale=config.float("embedding_multiplier", default=1.0),
        logit_scale=config.float("logits_scaling", default=1.0),
    )
