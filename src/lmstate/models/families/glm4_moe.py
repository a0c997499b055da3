"""GLM-4.5 (2508.06471) and Solar Open: attention that rotates half of each head, and DeepSeek-V3's experts."""

from __future__ import annotations

from lmstate.models.decoder import Model
from lmstate.models.families.common import (
    MOST,
    Shape,
    activation,
    attention,
    decoder,
    drafting,
    head_norms,
    mlp,
    pre_norm,
    rms_norms,
)
from lmstate.models.families.mixtures import deepseek_mixture, sparse_layers
from lmstate.models.mixers.mixer import Mixer
from lmstate.models.mlp import FeedForward
from lmstate.models.rope import make_rope
from lmstate.models.weights.weights import Weights


def build(w: Weights) -> Model:
    config, shape = w.config, Shape.of(w.config)
    sparse = sparse_layers(config, shape.layers)
    rope = make_rope(config, shape.head_dim).to(w.device)
    normed = config.bool("use_qk_norm", default=False)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = head_norms(w, prefix, shape) if normed else (None, None)
        return attention(w, prefix, shape, rope, q_norm=q_norm, k_norm=k_norm, out_biased=False)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if sparse[index]:
            return deepseek_mixture(w, prefix, shape)
        return mlp(w, prefix, shape.hidden, config.int("intermediate_size", low=1, high=MOST), activation(config))

    return decoder(w, shape, pre_norm(rms_norms(w, shape), mixer, feed_forward), ignore=drafting(config, shape))
