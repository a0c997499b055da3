"""Qwen2: Llama's block with biases on the query, key and value projections; some layers may slide. Dense or sparse."""

from __future__ import annotations

from collections.abc import Sequence

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

QWEN2 = {**b.LLAMA, **b.UNWINDOWED, "vocab_size": 151_936, "intermediate_size": 22_016, "max_window_layers": 28}
QWEN2_VL = {
    **QWEN2,
    **b.EPS,
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}
DEFAULTS: b.Defaults = {
    "qwen2": QWEN2,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen2_moe": b.UNWINDOWED,
    "qwen2_vl_text": QWEN2_VL,
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), _windows(config, shape.layers)

    def mixer(index: int, prefix: str) -> Mixer:
        return b.attention(w, prefix, shape, rope, window=window[index])

    def feed_forward(index: int, prefix: str) -> FeedForward:
        return b.qwen_feed_forward(w, index, prefix, shape, normalize=False)

    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, feed_forward))


def _windows(config: Config, layers: int) -> Sequence[int | None]:
    """Each layer's window; without a list of kinds, every second layer of a mixture's first ones slides."""
    if config.str("model_type") != "qwen2_moe" or config.given("layer_types"):
        return b.layer_windows(config, layers)
    size, last = b.config_window(config, switch=True), config.int("max_window_layers", default=28)
    return [size if index % 2 == 0 and index < last else None for index in range(layers)]
