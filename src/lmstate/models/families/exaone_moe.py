"""K-EXAONE (LG AI Research): EXAONE 4's attention, which knows positions only where it has a window, and experts."""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.attention import attention
from lmstate.models.families.builders.decoder import decoder, pre_norm
from lmstate.models.families.builders.defaults import EPS, Defaults
from lmstate.models.families.builders.dims import MOST, Dims, drafting, there, windows
from lmstate.models.families.builders.mlp import activation, mlp
from lmstate.models.families.builders.moe import corrected_router, deepseek_mixture, sparse_layers
from lmstate.models.families.builders.norms import head_norms, rms_norms
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: Defaults = {
    "exaone_moe": {**EPS, "sliding_window": 4096, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    rope = make_rope(config, shape.head_dim).to(w.device)
    config.int("sliding_window", low=1)  # without one no layer would know positions
    window = windows(config, shape.layers, full_every=4, switch=False)
    sparse = sparse_layers(config, shape.layers)
    shared = config.int("num_shared_experts", high=MOST, default=1)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = head_norms(w, prefix, shape)
        size = window[index]
        return attention(w, prefix, shape, None if size is None else rope, window=size, q_norm=q_norm, k_norm=k_norm)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not sparse[index]:
            return mlp(w, prefix, shape.hidden, inner, act)
        name = "e_score_correction_bias"
        e_score_correction_bias = there(w, f"{prefix}.{name}", f"{prefix}.gate.{name}")
        router = corrected_router(w, f"{prefix}.gate.weight", e_score_correction_bias, shape.hidden)
        return deepseek_mixture(w, prefix, shape, router, shared=shared)

    return decoder(
        w, shape, pre_norm(rms_norms(w, shape), mixer, feed_forward), ignore=("mtp.*", *drafting(config, shape))
    )
