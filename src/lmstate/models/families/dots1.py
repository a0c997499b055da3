"""dots.llm1 (2506.05767): Qwen3's attention and DeepSeek-V3's experts."""

from __future__ import annotations

from lmstate.models.decoder import Model
from lmstate.models.families.common import (
    Shape,
    attention,
    decoder,
    head_norms,
    pre_norm,
    rms_norms,
    windows,
)
from lmstate.models.families.mixtures import deepseek_feed_forward
from lmstate.models.mixers.mixer import Mixer
from lmstate.models.rope import make_rope
from lmstate.models.weights.weights import Weights


def build(w: Weights) -> Model:
    config, shape = w.config, Shape.of(w.config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), windows(config, shape.layers, switch=False)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = head_norms(w, prefix, shape)
        return attention(w, prefix, shape, rope, window=window[index], q_norm=q_norm, k_norm=k_norm)

    return decoder(w, shape, pre_norm(rms_norms(w, shape), mixer, deepseek_feed_forward(w, shape)))
