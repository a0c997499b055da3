"""Command R (Cohere) and Command R7B (Cohere 2): attention and feed-forward side by side.

x = embed(tokens)
y = norm(x)    # layer norms without biases
x = x + attention(y) + mlp(y)
logits = scale * head(norm(x))

Cohere 2 knows positions only where there is a window. Command R+ normalizes queries and keys, each head by weights of
its own.
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Norm

DEFAULTS: b.Defaults = {
    "cohere": {**b.LAYER_NORM_EPS, "rope_theta": 500_000.0},
    "cohere2": {
        **b.LAYER_NORM_EPS,
        "vocab_size": 256_000,
        "hidden_size": 8192,
        "intermediate_size": 22_528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "sliding_window": 4096,
    },
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config, eps="layer_norm_eps")
    second = config.str("model_type") == "cohere2"
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, normed = (
        make_rope(config, shape.head_dim, interleaved=True).to(w.device),
        b.layer_norms(w, shape, biased=False),
    )
    window = b.layer_windows(config, shape.layers, full_every=4) if second else [None] * shape.layers
    heads_normed = not second and config.bool("use_qk_norm", default=False)

    def head_norm(name: str, heads: int) -> Norm | None:
        return Norm(w.tensor(f"{name}.weight", (heads, shape.head_dim)), shape.eps, "layer") if heads_normed else None

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        both, size = normed(f"{layer}.input_layernorm"), window[index]
        return Block(
            b.attention(
                w, f"{layer}.self_attn", shape, None if second and size is None else rope, window=size,
                q_norm=head_norm(f"{layer}.self_attn.q_norm", shape.heads),
                k_norm=head_norm(f"{layer}.self_attn.k_norm", shape.kv_heads),
            ),
            b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            both,
            both,
            parallel=True,
        )  # fmt: skip

    return b.decoder(
        w,
        shape,
        block,
        final_norm=normed("model.norm"),
        logit_scale=config.float("logit_scale", default=0.0625),
    )
