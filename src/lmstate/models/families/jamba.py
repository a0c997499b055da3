"""Jamba: Mamba and, once in a while, attention without positions; every few layers the feed-forward part is experts.

x = embed(tokens)
x = x + mixer(norm(x))    # Mamba; in every eighth layer attention
x = x + mlp(norm(x))      # in every second layer experts
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.model import Block, Model
from lmstate.ops import FloatWeight

DEFAULTS: b.Defaults = {}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    b.only_silu(config)
    sizes = b.MambaShape(
        b.expanded(config, "mamba_expand", shape.hidden),
        config.int("mamba_d_state", low=1, high=b.MAX_SIZE, default=16),
        b.dt_rank(config, "mamba_dt_rank", shape.hidden),
        config.int("mamba_d_conv", low=1, high=b.MAX_SIZE, default=4),
    )
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    attention_every = config.int("attn_layer_period", low=1, default=8), config.int("attn_layer_offset", default=4)
    experts_every = config.int("expert_layer_period", low=1, default=2), config.int("expert_layer_offset", default=1)
    count = config.int("num_experts", low=1, high=b.MAX_SIZE, default=16)

    def mixer(index: int, layer: str) -> Mixer:
        if _due(index, *attention_every):
            return b.attention(w, f"{layer}.self_attn", shape, None)
        parts = (("dt", sizes.rank), ("b", sizes.state_size), ("c", sizes.state_size))
        norms = tuple(b.norm(w, f"{layer}.mamba.{part}_layernorm.weight", width, shape.eps) for part, width in parts)
        return b.mamba(w, f"{layer}.mamba", sizes, shape.hidden, norms)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if count == 1 or not _due(index, *experts_every):
            return b.mlp(w, prefix, shape.hidden, inner, act)
        router = FloatWeight(w.tensor(f"{prefix}.router.weight", (count, shape.hidden)))
        each = b.experts(w, f"{prefix}.experts", count, shape.hidden, inner, act)
        return MixtureOfExperts(Router(router, config.int("num_experts_per_tok", low=1, high=count)), each)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, layer),
            feed_forward(index, f"{layer}.feed_forward"),
            b.norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            b.norm(w, f"{layer}.pre_ff_layernorm.weight", shape.hidden, shape.eps),
        )

    return b.decoder(w, shape, block, final_norm=b.norm(w, "model.final_layernorm.weight", shape.hidden, shape.eps))


def _due(index: int, period: int, offset: int) -> bool:
    return index % period == offset
