"""Flint (RecursiveSI): Qwen3's attention with sinks and windows, and experts beside one that is not gated.

x = embed(tokens)
x = x + attention(norm(x))                                  # queries and keys normalized; a sink a head
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x)
logits = head(norm(x))

Layers without a window know no positions.
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "flint": {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 513,
        "shared_expert_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
        "mlp_only_layers": [0, 1],
    }
}
F, S = "full_attention", "sliding_attention"


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, dense = make_rope(config, shape.head_dim).to(w.device), config.ints("mlp_only_layers", default=())
    every = config.int("decoder_sparse_step", low=1, default=1)
    kinds = config.strs("layer_types", shape.layers, (F, S), default=None) or [
        F if index < 2 or index % 4 == 1 or index == shape.layers - 1 else S for index in range(shape.layers)
    ]
    size = config.int("sliding_window", low=1)

    def mixer(index: int, name: str) -> Attention:
        q_norm, k_norm = b.head_norms(w, name, shape)
        slides = kinds[index] == S
        made = b.attention(
            w, name, shape, rope if slides else None, window=size if slides else None, q_norm=q_norm, k_norm=k_norm
        )
        sinks = b.first_present(w, f"{name}.softmax_offset", f"{name}.sinks")
        return replace(made, sinks=w.tensor(sinks, (shape.heads,)))

    def feed_forward(index: int, name: str) -> FeedForward:
        if index in dense or (index + 1) % every:
            return b.mlp(w, name, shape.hidden, inner, act)
        return ungated_shared(w, name, shape, "sigmoid", normalize=True)

    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, feed_forward))


def ungated_shared(w: WeightLoader, name: str, shape: b.Dims, scoring: str, *, normalize: bool) -> MixtureOfExperts:
    """Qwen's experts beside one that every token goes through whole. `normalize`: where the config does not say."""
    config, count, act = w.config, b.expert_count(w.config), b.activation(w.config)
    router = Router(
        b.router_weight(w, f"{name}.gate.weight", count, shape.hidden),
        b.top_k(config, count),
        "sigmoid" if scoring == "sigmoid" else "softmax",
        normalize=config.bool("norm_topk_prob", default=normalize),
    )
    width = config.int("shared_expert_intermediate_size", low=1, high=b.MAX_SIZE)
    return MixtureOfExperts(
        router,
        b.experts(w, f"{name}.experts", count, shape.hidden, b.expert_width(config), act),
        b.mlp(w, f"{name}.shared_expert", shape.hidden, width, act),
    )
