"""Laguna (Poolside): gated attention whose number of heads differs from layer to layer, and experts.

x = embed(tokens)
x = x + out(softplus(gate(y)) * attention(y))               # y = norm(x)
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x); some layers: an MLP
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.layers.rope import ropes_by_kind
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "laguna": {
        "head_dim": 128,
        "sliding_window": 512,
        "first_k_dense_replace": 1,
        "rope_scaling": {
            "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 10_000.0},
        },
    }
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    _refuse(config)
    inner, act, count = (
        config.int("intermediate_size", low=1, high=b.MAX_SIZE),
        b.activation(config),
        b.expert_count(config),
    )
    heads = config.ints("num_attention_heads_per_layer", shape.layers, low=1, high=b.MAX_SIZE, default=None)
    heads = heads or (shape.heads,) * shape.layers
    window = b.layer_windows(config, shape.layers, full_every=1, switch=False)
    full, local = (rope.to(w.device) for rope in ropes_by_kind(config, shape.head_dim, theta=500_000.0))
    sparse = b.sparse_layers(config, shape.layers)
    every_feature = config.get("gating") == "per-element"

    def mixer(index: int, prefix: str) -> Attention:
        own, size = replace(shape, heads=heads[index]), window[index]
        rope = full if size is None else local
        q_norm, k_norm = b.head_norms(w, prefix, own)
        gates = ("g_proj", own.heads * own.head_dim if every_feature else own.heads)
        made = b.attention(w, prefix, own, rope, window=size, q_norm=q_norm, k_norm=k_norm, gates=gates)
        return replace(made, gate_act="softplus")

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not sparse[index]:
            return b.mlp(w, prefix, shape.hidden, inner, act)
        name = "e_score_correction_bias"
        e_score_correction_bias = b.first_present(w, f"{prefix}.experts.{name}", f"{prefix}.gate.{name}")
        scale = config.float("moe_routed_scaling_factor", default=1.0)
        beside = b.first_present(
            w, f"{prefix}.shared_expert.down_proj.weight", f"{prefix}.shared_experts.down_proj.weight"
        )
        width = config.int("shared_expert_intermediate_size", low=1, high=b.MAX_SIZE, default=512)
        return MixtureOfExperts(
            b.corrected_router(w, f"{prefix}.gate.weight", e_score_correction_bias, shape.hidden, scale=scale),
            b.experts(w, f"{prefix}.experts", count, shape.hidden, b.expert_width(config), act),
            b.mlp(w, beside.removesuffix(".down_proj.weight"), shape.hidden, width, act),
        )

    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, feed_forward))


def _refuse(config: Config) -> None:
    if config.get("moe_router_logit_softcapping"):
        raise ModelError(f"{config.where} asks for moe_router_logit_softcapping, which lmstate cannot do")
    if config.bool("moe_apply_router_weight_on_input", default=False):
        raise ModelError(f"{config.where} asks for moe_apply_router_weight_on_input, which lmstate cannot do")
    if config.get("gating", True) not in (True, "per-head", "per-element"):
        raise ModelError(
            f"{config.where} has gating = {config.get('gating')!r:.40}; known are per-head and per-element"
        )
