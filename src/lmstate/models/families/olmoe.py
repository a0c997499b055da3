"""OLMoE (2409.02060): Llama's block with norms over the whole query and key projections, and experts in every layer.

x = embed(tokens)
x = x + attention(norm(x))
x = x + sum over chosen e: g_e * expert_e(y)    # y = norm(x)
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"olmoe": b.EPS}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE)
    if config.given("clip_qkv"):
        raise ModelError(
            f"{config.where} asks for clip_qkv, by which OLMoE clips queries and keys behind their norms; lmstate "
            "cannot do that"
        )
    rope, window = make_rope(config, shape.head_dim).to(w.device), config.int("sliding_window", low=1, default=None)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = b.whole_norms(w, prefix, shape)
        return b.attention(w, prefix, shape, rope, window=window, q_norm=q_norm, k_norm=k_norm)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        return b.softmax_mixture(w, prefix, shape, inner, normalize=config.bool("norm_topk_prob", default=False))

    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, feed_forward))
