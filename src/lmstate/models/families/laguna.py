"""Laguna (Poolside): gated attention whose number of heads differs from layer to layer, and experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lmstate import ops
from lmstate.errors import ModelError
from lmstate.models.decoder import Model
from lmstate.models.families.common import (
    MOST,
    Shape,
    activation,
    biases,
    decoder,
    expert_count,
    experts,
    head_norms,
    mlp,
    pre_norm,
    rms_norms,
    there,
    windows,
)
from lmstate.models.families.mixtures import corrected_router, expert_width, sparse_layers
from lmstate.models.mixers.attention import Attention
from lmstate.models.mlp import FeedForward
from lmstate.models.moe import MixtureOfExperts
from lmstate.models.rope import Rope, ropes_by_kind
from lmstate.models.weights.fields import Fields
from lmstate.models.weights.weights import Weights
from lmstate.ops import Norm, Residual
from lmstate.state import KeyValueState, LayerState, Step


@dataclass(frozen=True, eq=False)
class SoftplusGated(Attention):
    """Attention whose last rows of `qkv` are a gate: one number a head, or one for each of its features."""

    def half(self, norm: Norm | None, after: Norm | None, scale: float) -> None:
        return None

    def mix(self, qkv: Tensor, step: Step, memory: LayerState, residual: Residual | None = None) -> Tensor:
        """What comes after the projections, `[R, T, (H + 2K) * D + G]` -> `[R, T, E]`."""
        assert isinstance(memory, KeyValueState) and self.q_norm is not None and self.k_norm is not None
        widths = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v, gate = qkv.split([*widths, qkv.shape[-1] - sum(widths)], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        new = (ops.norm(k, self.k_norm), v)  # [R, T, K, D] each
        scoring = ops.Scoring(self.scale, self.softcap, self.sinks)
        seen = memory.attend(ops.norm(q, self.q_norm), new, step, scoring, self.rotation(step))  # [R, T, H, D]
        # In float64, as in a router: torch rounds a vector's last elements otherwise than its first ones.
        opened = softplus(gate.double()).float().unflatten(-1, (self.heads, -1))  # [R, T, H, 1] or [R, T, H, D]
        return ops.linear((seen * opened).flatten(-2), self.out, self.out_bias, residual=residual)


def build(w: Weights) -> Model:
    config, shape = w.config, Shape.of(w.config)
    _refuse(config)
    inner, act, count = config.int("intermediate_size", low=1, high=MOST), activation(config), expert_count(config)
    heads = config.ints("num_attention_heads_per_layer", shape.layers, low=1, high=MOST, default=None)
    heads = heads or (shape.heads,) * shape.layers
    window = windows(config, shape.layers, full_every=1, switch=False)
    full, local = (rope.to(w.device) for rope in ropes_by_kind(config, shape.head_dim, theta=500_000.0))
    sparse = sparse_layers(config, shape.layers)

    def mixer(index: int, prefix: str) -> Attention:
        rope = full if window[index] is None else local
        made = gated_attention(w, prefix, replace(shape, heads=heads[index]), rope)
        return replace(made, window=window[index])

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not sparse[index]:
            return mlp(w, prefix, shape.hidden, inner, act)
        name = "e_score_correction_bias"
        correction = there(w, f"{prefix}.experts.{name}", f"{prefix}.gate.{name}")
        scale = config.float("moe_routed_scaling_factor", default=1.0)
        beside = there(w, f"{prefix}.shared_expert.down_proj.weight", f"{prefix}.shared_experts.down_proj.weight")
        width = config.int("shared_expert_intermediate_size", low=1, high=MOST, default=512)
        return MixtureOfExperts(
            corrected_router(w, f"{prefix}.gate.weight", correction, shape.hidden, scale=scale),
            experts(w, f"{prefix}.experts", count, shape.hidden, expert_width(config), act),
            mlp(w, beside.removesuffix(".down_proj.weight"), shape.hidden, width, act),
        )

    return decoder(w, shape, pre_norm(rms_norms(w, shape), mixer, feed_forward))


def _refuse(config: Fields) -> None:
    if config.get("moe_router_logit_softcapping"):
        raise ModelError(f"{config.where} asks for moe_router_logit_softcapping, which is not supported")
    if config.bool("moe_apply_router_weight_on_input", default=False):
        raise ModelError(f"{config.where} asks for moe_apply_router_weight_on_input, which is not supported")
    if config.get("gating", True) not in (True, "per-head", "per-element"):
        raise ModelError(
            f"{config.where} has gating = {config.get('gating')!r:.40}; known are per-head and per-element"
        )


def gated_attention(w: Weights, prefix: str, shape: Shape, rope: Rope) -> SoftplusGated:
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gates = width if w.config.get("gating") == "per-element" else shape.heads
    wanted = w.config.bool("attention_bias", default=False)
    bias = biases(w, *(f"{prefix}.{part}_proj.bias" for part in "qkv"), wanted=wanted)
    q_norm, k_norm = head_norms(w, prefix, shape)
    return SoftplusGated(
        w.linear(
            *(f"{prefix}.{part}_proj.weight" for part in "qkvg"),
            shape=((width, kv_width, kv_width, gates), shape.hidden),
        ),
        w.linear(f"{prefix}.o_proj.weight", shape=(shape.hidden, width)),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim**-0.5,
        rope,
        q_norm=q_norm,
        k_norm=k_norm,
        qkv_bias=None if bias is None else torch.cat([bias, bias.new_zeros(gates)]),
        out_bias=biases(w, f"{prefix}.o_proj.bias", wanted=wanted),
    )
