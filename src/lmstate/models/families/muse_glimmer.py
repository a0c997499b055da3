"""Muse Glimmer's text model: gated attention with positions only where it has a window, and norms around both parts.

x = norm(embed(tokens))
x = x + norm(attention(norm(x)))    # normed queries and keys; queries times a factor
x = x + norm(mlp(norm(x)))
logits = cap(scale * head(norm(x)))

Norms of layers store w - 1, and those after a part have an epsilon of their own.
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.embedding import NormedEmbedding
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Norm

DEFAULTS: b.Defaults = {
    "muse_glimmer_text": {
        **b.EPS,
        "vocab_size": 202_048,
        "hidden_size": 6656,
        "intermediate_size": 19_968,
        "num_hidden_layers": 52,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "sliding_window": 2048,
        "qk_scale_factor": 3.87,
        "output_multiplier": 26**-0.5,
        "final_logit_softcapping": 20.0,
    }
}
FULL, SLIDING = "full_attention", "sliding_attention"


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    near = [bool((shape.layers - 1 - index) % 4) for index in range(shape.layers)]
    given = config.strs("layer_types", shape.layers, (FULL, SLIDING), default=None)
    slides = near if given is None else [kind == SLIDING for kind in given]
    # Zeros mark layers without positions. The others share one rope, as in transformers, whatever their numbers.
    turns = config.floats("layer_rope_theta", shape.layers, low=0.0, high=1e18, default=None) or near
    size, rope = b.config_window(config, switch=False), make_rope(config, shape.head_dim).to(w.device)
    scale = shape.head_dim**-0.5 * config.float("qk_scale_factor", low=0.0)
    normed = b.rms_norms(w, shape, plus_one=True)
    behind = b.rms_norms(w, replace(shape, eps=config.float("post_norm_eps", 0.0, 1.0, default=1e-8)), plus_one=True)

    def head_norms(prefix: str) -> tuple[Norm, Norm]:
        if w.has(f"{prefix}.q_norm.weight"):  # in GGUF, where it has the factor of queries
            return b.head_norms(w, prefix, shape)
        plain = b.plain_norm(w, shape.head_dim, shape.eps)
        return plain, plain

    def mixer(index: int, prefix: str) -> Attention:
        q_norm, k_norm = head_norms(prefix)
        return b.attention(
            w, prefix, shape, rope if turns[index] else None, window=size if slides[index] else None, scale=scale,
            q_norm=q_norm, k_norm=k_norm, gates=("gate_proj", shape.heads * shape.head_dim),
        )  # fmt: skip

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, f"{layer}.self_attn"),
            b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.pre_feedforward_layernorm"),
            behind(f"{layer}.post_attention_layernorm"),
            behind(f"{layer}.post_feedforward_layernorm"),
        )

    return b.decoder(
        w,
        shape,
        block,
        entry=NormedEmbedding(b.plain_norm(w, shape.hidden, shape.eps)),
        logit_scale=config.float("output_multiplier"),
        logit_softcap=config.float("final_logit_softcapping", low=1e-6, default=None),
    )
