"""OLMo 2 and 3: norms after each part instead of before, and over the whole query and key projections.

x = embed(tokens)
x = x + norm(attention(x))
x = x + norm(mlp(x))    # FlexOlmo: experts
logits = head(norm(x))

Three of four layers of OLMo 3 have a window, and stretched rotary positions are those of the others alone. FlexOlmo
(2507.07024) is OLMo 2 with experts.
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import make_rope, ropes_by_kind
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {
    "flex_olmo": {"rope_theta": 500_000.0},
    "olmo2": b.EPS,
    "olmo3": {**b.EPS, "sliding_window": 4096},
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    family, normed = config.str("model_type"), b.rms_norms(w, shape)
    if family == "olmo3":
        window = b.layer_windows(config, shape.layers, full_every=4)
        full, local = (rope.to(w.device) for rope in ropes_by_kind(config, shape.head_dim, theta=500_000.0))
    else:
        window = [None] * shape.layers
        full = local = make_rope(config, shape.head_dim).to(w.device)

    def feed_forward(prefix: str) -> FeedForward:
        if family != "flex_olmo":
            return b.mlp(w, prefix, shape.hidden, inner, act)
        return b.softmax_mixture(w, prefix, shape, inner, normalize=config.bool("norm_topk_prob", default=False))

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        q_norm, k_norm = b.whole_norms(w, f"{layer}.self_attn", shape)
        size = window[index]
        rope = full if size is None else local
        return Block(
            b.attention(w, f"{layer}.self_attn", shape, rope, window=size, q_norm=q_norm, k_norm=k_norm),
            feed_forward(f"{layer}.mlp"),
            mixer_post_norm=normed(f"{layer}.post_attention_layernorm"),
            mlp_post_norm=normed(f"{layer}.post_feedforward_layernorm"),
        )

    return b.decoder(w, shape, block)
