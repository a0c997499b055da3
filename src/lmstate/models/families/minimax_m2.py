"""MiniMax-M2: norms over the whole query and key projections, partly rotating heads, experts chosen by sigmoids.

x = embed(tokens)
x = x + attention(norm(x))
x = x + sum over chosen e: g_e * expert_e(y)    # y = norm(x)
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"minimax_m2": {"head_dim": 128}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, count = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.expert_count(config)
    # Published configs say how many features of a head rotate, and not which part of it.
    turning = config.int("rotary_dim", low=2, high=shape.head_dim, default=shape.head_dim)
    rope = make_rope(config, shape.head_dim, theta=5e6, fraction=turning / shape.head_dim).to(w.device)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = b.whole_norms(w, prefix, shape)
        return b.attention(w, prefix, shape, rope, q_norm=q_norm, k_norm=k_norm)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        gate = b.first_present(w, f"{prefix}.gate.weight", f"model.layers.{index}.block_sparse_moe.gate.weight")
        inside = gate.removesuffix(".gate.weight")
        router = Router(
            b.router_weight(w, gate, count, shape.hidden),
            b.top_k(config, count),
            "sigmoid",
            normalize=True,
            e_score_correction_bias=w.tensor(f"{inside}.e_score_correction_bias", (count,)),
        )
        each = b.experts(w, f"{inside}.experts", count, shape.hidden, inner, b.activation(config))
        return MixtureOfExperts(router, each)

    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, feed_forward))
