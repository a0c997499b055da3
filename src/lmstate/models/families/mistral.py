"""Mistral (Jiang et al. 2023) and Mixtral: Llama's block with a window on every layer; Mixtral's experts are chosen.

x = embed(tokens)
x = x + attention(norm(x))
x = x + mlp(norm(x))    # Mixtral: the sum over chosen e of g_e * expert_e(norm(x))
logits = head(norm(x))

Ministral has windows on some layers. The queries of Ministral 3 grow with their position.
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention, Temperature
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import make_rope, rope_fields
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "cwm": {
        **b.EPS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 8192,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {
        **b.EPS,
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_scaling": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mistral": {**b.LLAMA, "intermediate_size": 14_336, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {**b.EPS, "rope_theta": 1e6},
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, window = (
        make_rope(config, shape.head_dim).to(w.device),
        [b.config_window(config, switch=False)] * shape.layers,
    )
    family = config.str("model_type")
    if family in ("mistral", "ministral", "cwm") and config.given("layer_types"):
        window = b.layer_windows(config, shape.layers)  # Ministral, under the older name too
    elif family == "cwm":  # the first of every four layers sees everything
        window = [size if index % 4 else None for index, size in enumerate(window)]
    temperature = temperature_of(rope_fields(config)) if family == "ministral3" else None

    def mixer(index: int, prefix: str) -> Attention:
        return replace(b.attention(w, prefix, shape, rope, window=window[index]), temperature=temperature)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not b.expert_count(config):
            return b.mlp(w, prefix, shape.hidden, inner, act)
        gate = b.first_present(w, f"{prefix}.gate.weight", f"model.layers.{index}.block_sparse_moe.gate.weight")
        return b.softmax_mixture(w, gate.removesuffix(".gate.weight"), shape, inner, normalize=True)

    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, feed_forward))


def temperature_of(rope: Config) -> Temperature | None:
    """Growth of queries past each multiple of the length that the model was trained for."""
    strength = rope.float("llama_4_scaling_beta", low=0.0, default=0.0)
    if not strength:
        return None
    return Temperature(rope.int("original_max_position_embeddings", low=1), strength, first=0)
