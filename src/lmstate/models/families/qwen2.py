"""Qwen2, and MiMo-7B: Llama's block with biases on q, k and v; some layers may slide. Dense or sparse.

x = embed(tokens)
x = x + attention(norm(x))
x = x + mlp(norm(x))    # or experts beside a gated shared one
logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import make_rope, position_axes
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
    "mimo": QWEN2,
    "qwen2": QWEN2,
    "qwen2_5_omni_text": {
        **QWEN2,
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen2_moe": b.UNWINDOWED,
    "qwen2_vl_text": QWEN2_VL,
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), _windows(config, shape.layers)
    if config.str("model_type") in ("qwen2_vl_text", "qwen2_5_vl_text"):
        rope = replace(rope, axes=position_axes(config, len(rope.frequencies), (16, 24, 24)))

    def mixer(index: int, prefix: str) -> Mixer:
        return b.attention(w, prefix, shape, rope, window=window[index] if index < shape.layers else None)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        return b.qwen_feed_forward(w, index, prefix, shape, normalize=False)

    norms = b.rms_norms(w, shape)
    block = b.pre_norm(norms, mixer, feed_forward)
    heads = b.prediction_heads(w, shape, norms, _head_names(w), partial(block, shape.layers), hidden_first=True)
    ignore = ("model.mtp_layers.*",) if config.str("model_type") == "mimo" else ()
    return b.decoder(w, shape, block, heads=heads, ignore=ignore)


def _head_names(w: WeightLoader) -> Iterator[b.HeadNames]:
    """The heads of MiMo-7B (2505.07608)."""
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    for layer in (f"model.mtp_layers.{index}" for index in range(b.MOST_HEADS)):
        if not w.has(f"{layer}.input_proj.weight"):
            return
        yield b.HeadNames(layer, *(f"{layer}.{name}" for name in names))


def _windows(config: Config, layers: int) -> Sequence[int | None]:
    """Each layer's window; without a list of kinds, every second layer of a mixture's first ones slides."""
    if config.str("model_type") != "qwen2_moe" or config.given("layer_types"):
        return b.layer_windows(config, layers)
    size, last = b.config_window(config, switch=True), config.int("max_window_layers", default=28)
    return [size if index % 2 == 0 and index < last else None for index in range(layers)]
