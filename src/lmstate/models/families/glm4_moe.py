"""GLM-4.5 (2508.06471) and Solar Open: attention that rotates half of each head, and DeepSeek-V3's experts."""

from __future__ import annotations

from functools import partial

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "glm4_moe": {**b.EPS, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "solar_open": {**b.EPS, "head_dim": 128, "n_shared_experts": 1, "rope_theta": 1e6},
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    rope = make_rope(config, shape.head_dim).to(w.device)
    normed = config.bool("use_qk_norm", default=False)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = b.head_norms(w, prefix, shape) if normed else (None, None)
        return b.attention(w, prefix, shape, rope, q_norm=q_norm, k_norm=k_norm, out_biased=False)

    norms = b.rms_norms(w, shape)
    block = b.pre_norm(norms, mixer, b.deepseek_feed_forward(w, shape))
    names = b.layers_past_the_last(w, shape.layers)
    heads = b.prediction_heads(w, shape, norms, names, partial(block, shape.layers))
    return b.decoder(w, shape, block, heads=heads, ignore=b.mtp_tensors(config, shape))
