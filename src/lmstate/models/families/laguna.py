"""Laguna (Poolside): gated attention whose number of heads differs from layer to layer, and experts."""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families.builders.attention import attention
from lmstate.models.families.builders.decoder import decoder, pre_norm
from lmstate.models.families.builders.defaults import Defaults
from lmstate.models.families.builders.dims import MOST, Dims, there, windows
from lmstate.models.families.builders.mlp import activation, mlp
from lmstate.models.families.builders.moe import corrected_router, expert_count, expert_width, experts, sparse_layers
from lmstate.models.families.builders.norms import head_norms, rms_norms
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.layers.rope import ropes_by_kind
from lmstate.models.model import Model

DEFAULTS: Defaults = {
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
    config, shape = w.config, Dims.of(w.config)
    _refuse(config)
    inner, act, count = config.int("intermediate_size", low=1, high=MOST), activation(config), expert_count(config)
    heads = config.ints("num_attention_heads_per_layer", shape.layers, low=1, high=MOST, default=None)
    heads = heads or (shape.heads,) * shape.layers
    window = windows(config, shape.layers, full_every=1, switch=False)
    full, local = (rope.to(w.device) for rope in ropes_by_kind(config, shape.head_dim, theta=500_000.0))
    sparse = sparse_layers(config, shape.layers)
    every_feature = config.get("gating") == "per-element"

    def mixer(index: int, prefix: str) -> Attention:
        own, size = replace(shape, heads=heads[index]), window[index]
        rope = full if size is None else local
        q_norm, k_norm = head_norms(w, prefix, own)
        gates = ("g_proj", own.heads * own.head_dim if every_feature else own.heads)
        made = attention(w, prefix, own, rope, window=size, q_norm=q_norm, k_norm=k_norm, gates=gates)
        return replace(made, gate_act="softplus")

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not sparse[index]:
            return mlp(w, prefix, shape.hidden, inner, act)
        name = "e_score_correction_bias"
        e_score_correction_bias = there(w, f"{prefix}.experts.{name}", f"{prefix}.gate.{name}")
        scale = config.float("moe_routed_scaling_factor", default=1.0)
        beside = there(w, f"{prefix}.shared_expert.down_proj.weight", f"{prefix}.shared_experts.down_proj.weight")
        width = config.int("shared_expert_intermediate_size", low=1, high=MOST, default=512)
        return MixtureOfExperts(
            corrected_router(w, f"{prefix}.gate.weight", e_score_correction_bias, shape.hidden, scale=scale),
            experts(w, f"{prefix}.experts", count, shape.hidden, expert_width(config), act),
            mlp(w, beside.removesuffix(".down_proj.weight"), shape.hidden, width, act),
        )

    return decoder(w, shape, pre_norm(rms_norms(w, shape), mixer, feed_forward))


def _refuse(config: Config) -> None:
    if config.get("moe_router_logit_softcapping"):
        raise ModelError(f"{config.where} asks for moe_router_logit_softcapping, which lmstate cannot do")
    if config.bool("moe_apply_router_weight_on_input", default=False):
        raise ModelError(f"{config.where} asks for moe_apply_router_weight_on_input, which lmstate cannot do")
    if config.get("gating", True) not in (True, "per-head", "per-element"):
        raise ModelError(
            f"{config.where} has gating = {config.get('gating')!r:.40}; known are per-head and per-element"
        )
