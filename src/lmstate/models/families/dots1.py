"""dots.llm1 (2506.05767): Qwen3's attention and DeepSeek-V3's experts."""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.attention import attention
from lmstate.models.families.builders.decoder import decoder, pre_norm
from lmstate.models.families.builders.defaults import Defaults
from lmstate.models.families.builders.dims import Dims, windows
from lmstate.models.families.builders.moe import deepseek_feed_forward
from lmstate.models.families.builders.norms import head_norms, rms_norms
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: Defaults = {"dots1": {"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, Dims.of(w.config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), windows(config, shape.layers, switch=False)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = head_norms(w, prefix, shape)
        return attention(w, prefix, shape, rope, window=window[index], q_norm=q_norm, k_norm=k_norm)

    return decoder(w, shape, pre_norm(rms_norms(w, shape), mixer, deepseek_feed_forward(w, shape)))
