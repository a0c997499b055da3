"""Qwen3, dense and mixture of experts: queries and keys are normalized head by head before they rotate.

x = embed(tokens)
x = x + attention(norm(x))    # queries and keys normalized head by head
x = x + mlp(norm(x))          # or experts
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import make_rope, position_axes
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "qwen3": {**b.UNWINDOWED, "max_window_layers": 28},
    "qwen3_moe": b.UNWINDOWED,
    "qwen3_omni_moe_text": {
        "vocab_size": 3584,
        "hidden_size": 2048,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "qwen3_vl_moe_text": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3_vl_text": {
        **b.LLAMA,
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rope_theta": 500_000.0,
    },
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), b.layer_windows(config, shape.layers)
    family = config.str("model_type")
    if family in ("qwen3_vl_text", "qwen3_vl_moe_text"):
        rope = replace(rope, axes=position_axes(config, len(rope.frequencies), (24, 20, 20), interleaved=True))
    if family == "qwen3_moe":  # its config may name layers, which its published code does not ask
        window = [b.config_window(config, switch=True)] * shape.layers
    elif family == "qwen3_vl_moe_text":
        window = [None] * shape.layers

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = b.head_norms(w, prefix, shape)
        return b.attention(w, prefix, shape, rope, window=window[index], q_norm=q_norm, k_norm=k_norm)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        return b.qwen_feed_forward(w, index, prefix, shape, normalize=family == "qwen3_vl_moe_text")

    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, feed_forward))
