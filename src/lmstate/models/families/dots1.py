"""dots.llm1 (2506.05767): Qwen3's attention and DeepSeek-V3's experts."""

from __future__ import annotations

from lmstate.models.decoder import Model
from lmstate.models.families.common import (
    MOST,
    Shape,
    activation,
    attention,
    decoder,
    head_norms,
    mlp,
    pre_norm,
    rms_norms,
    windows,
)
from lmstate.models.families.mixtures import deepseek_mixture, sparse_layers
from lmstate.models.mixers.mixer import Mixer
from lmstate.models.mlp import FeedForward
from lmstate.models.rope import make_rope
from lmstate.models.weights.weights import Weights


def build(w: Weights) -> Model:
    config, shape = w.config, Shape.of(w.config)
    sparse, window = sparse_layers(config, shape.layers), windows(config, shape.layers, switch=False)
    rope = make_rope(config, shape.head_dim).to(w.device)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = head_norms(w, prefix, shape)
        return attention(w, prefix, shape, rope, window=window[index], q_norm=q_norm, k_norm=k_norm)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if sparse[index]:
            return deepseek_mixture(w, prefix, shape)
        return mlp(w, prefix, shape.hidden, config.int("intermediate_size", low=1, high=MOST), activation(config))

    return decoder(w, shape, pre_norm(rms_norms(w, shape), mixer, feed_forward))
