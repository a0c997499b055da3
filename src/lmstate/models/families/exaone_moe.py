"""K-EXAONE (LG AI Research): EXAONE 4's attention, which knows positions only where it has a window, and experts.

x = embed(tokens)
x = x + attention(norm(x))                                  # queries and keys normalized head by head
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x); the first layers: an MLP
logits = head(norm(x))
"""

from __future__ import annotations

from functools import partial
from itertools import chain

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "exaone_moe": {**b.EPS, "sliding_window": 4096, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope = make_rope(config, shape.head_dim).to(w.device)
    config.int("sliding_window", low=1)  # without one no layer would know positions
    window = b.layer_windows(config, shape.layers, full_every=4, switch=False)
    sparse = b.sparse_layers(config, shape.layers)
    head_window = b.head_window(config, slides=window[0] is not None)
    shared = config.int("num_shared_experts", high=b.MAX_SIZE, default=1)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = b.head_norms(w, prefix, shape)
        size = window[index] if index < shape.layers else head_window
        return b.attention(w, prefix, shape, None if size is None else rope, window=size, q_norm=q_norm, k_norm=k_norm)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not (sparse[index] if index < shape.layers else w.has(f"{prefix}.gate.weight")):
            return b.mlp(w, prefix, shape.hidden, inner, act)
        name = "e_score_correction_bias"
        e_score_correction_bias = b.first_present(w, f"{prefix}.{name}", f"{prefix}.gate.{name}")
        router = b.corrected_router(w, f"{prefix}.gate.weight", e_score_correction_bias, shape.hidden)
        return b.deepseek_mixture(w, prefix, shape, router, shared=shared)

    norms = b.rms_norms(w, shape)
    block = b.pre_norm(norms, mixer, feed_forward)
    names = chain(b.mtp_layers(w), b.layers_past_the_last(w, shape.layers))
    heads = b.prediction_heads(w, shape, norms, names, partial(block, shape.layers))
    return b.decoder(w, shape, block, heads=heads, ignore=b.mtp_tensors(config, shape))
