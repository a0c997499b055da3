"""Mellum (JetBrains): Qwen3's block with experts, where windowed layers rotate at a rate of their own.

x = embed(tokens)
x = x + attention(norm(x))                      # queries and keys normalized head by head
x = x + sum over chosen e: g_e * expert_e(y)    # y = norm(x); some layers: an MLP
logits = head(norm(x))
"""

from __future__ import annotations

from functools import partial

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import ropes_by_kind
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"mellum": {"head_dim": 128, "sliding_window": 1024}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    window = b.layer_windows(config, shape.layers, full_every=1, switch=False)
    full, local = (
        rope.to(w.device) for rope in ropes_by_kind(config, shape.head_dim, theta=500_000.0, local_theta=10_000.0)
    )
    sparse = b.sparse_layers(config, shape.layers)
    head_window = b.head_window(config, slides=True)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = b.head_norms(w, prefix, shape)
        size = window[index] if index < shape.layers else head_window
        rope = full if size is None else local
        return b.attention(w, prefix, shape, rope, window=size, q_norm=q_norm, k_norm=k_norm)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not (sparse[index] if index < shape.layers else w.has(f"{prefix}.gate.weight")):
            return b.mlp(
                w, prefix, shape.hidden, config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
            )
        normalize = config.bool("norm_topk_prob", default=True)
        return b.softmax_mixture(w, prefix, shape, b.expert_width(config), normalize=normalize)

    norms = b.rms_norms(w, shape)
    block = b.pre_norm(norms, mixer, feed_forward)
    heads = b.prediction_heads(w, shape, norms, b.mtp_layers(w), partial(block, shape.layers))
    return b.decoder(w, shape, block, heads=heads)
