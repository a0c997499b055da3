"""MiniMax-M2: norms over the whole query and key projections, partly rotating heads, experts chosen by sigmoids."""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.attention import attention
from lmstate.models.families.builders.decoder import decoder, pre_norm
from lmstate.models.families.builders.defaults import Defaults
from lmstate.models.families.builders.dims import MOST, Dims, there
from lmstate.models.families.builders.mlp import activation
from lmstate.models.families.builders.moe import expert_count, experts, scores, top_k
from lmstate.models.families.builders.norms import rms_norms, whole_norms
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: Defaults = {"minimax_m2": {"head_dim": 128}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, Dims.of(w.config)
    inner, count = config.int("intermediate_size", low=1, high=MOST), expert_count(config)
    # Published configs say how many features of a head rotate, and not which part of it.
    turning = config.int("rotary_dim", low=2, high=shape.head_dim, default=shape.head_dim)
    rope = make_rope(config, shape.head_dim, theta=5e6, fraction=turning / shape.head_dim).to(w.device)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = whole_norms(w, prefix, shape)
        return attention(w, prefix, shape, rope, q_norm=q_norm, k_norm=k_norm)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        gate = there(w, f"{prefix}.gate.weight", f"model.layers.{index}.block_sparse_moe.gate.weight")
        inside = gate.removesuffix(".gate.weight")
        router = Router(
            scores(w, gate, count, shape.hidden),
            top_k(config, count),
            "sigmoid",
            normalize=True,
            e_score_correction_bias=w.tensor(f"{inside}.e_score_correction_bias", (count,)),
        )
        each = experts(w, f"{inside}.experts", count, shape.hidden, inner, activation(config))
        return MixtureOfExperts(router, each)

    return decoder(w, shape, pre_norm(rms_norms(w, shape), mixer, feed_forward))
