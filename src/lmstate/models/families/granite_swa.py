"""Granite with sliding windows: Granite's multipliers and mixtures, attention sinks, a rotation for every layer.

x = m_e * embed(tokens)
x = x + m * attention(norm(x))    # a sink a head
x = x + m * feed_forward(norm(x))
logits = head(norm(x)) / m_l
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.families.granite import feed_forward, granite
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import Rope, make_rope, rope_fields
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "granite_swa": {**b.EPS, "num_key_value_heads": 4, "sliding_window": 128, "tie_word_embeddings": True},
    "granitemoe_swa": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128},
}

KINDS = ("full_attention", "sliding_attention")


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    kinds = config.strs("layer_types", shape.layers, allowed=KINDS, default=None)
    kinds = kinds or tuple(KINDS[bool(index % 4)] for index in range(shape.layers))
    size, scale = b.config_window(config, switch=False), config.float("attention_multiplier", default=1.0)
    rope = each_rope(w, shape)

    def mixer(index: int, name: str) -> Attention:
        window = size if kinds[index] == "sliding_attention" else None
        mixer = b.attention(w, name, shape, rope(index), window=window, scale=scale)
        return replace(mixer, sinks=w.tensor(f"{name}.sinks", (shape.heads,)))

    block = b.pre_norm(
        b.rms_norms(w, shape),
        mixer,
        lambda _, name: feed_forward(w, name.removesuffix(".mlp"), shape),
        scale=config.float("residual_multiplier", default=1.0),
    )
    return granite(w, shape, block)


def each_rope(w: WeightLoader, shape: b.Dims) -> Callable[[int], Rope | None]:
    """The rope of a layer; layers of one base share it, and those of base 0 know no positions."""
    rope = rope_fields(w.config)
    theta = rope.float("rope_theta", low=0.0, high=1e12, default=10_000.0)
    thetas = w.config.floats("layer_rope_theta", shape.layers, low=0.0, high=1e12, default=None)
    thetas = thetas or (theta,) * shape.layers

    @cache
    def made(theta: float) -> Rope | None:
        config = Config({**w.config, "rope_parameters": {**rope, "rope_theta": theta}})
        return make_rope(config, shape.head_dim).to(w.device) if theta else None

    return lambda index: made(thetas[index])
