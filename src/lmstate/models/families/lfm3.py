"""LFM3 (Liquid AI): short convolutions beside windowed and full attention, whose heads are gated; norms all around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmstate.models.decoder import Block, Model
from lmstate.models.families.common import MOST, W1_W3_W2, Shape, attention, decoder, mlp, norm, there
from lmstate.models.families.lfm2 import short_conv
from lmstate.models.mixers.mixer import Mixer
from lmstate.models.rope import ropes_by_kind
from lmstate.models.weights.fields import Fields
from lmstate.models.weights.weights import Weights
from lmstate.ops import Norm

KINDS = ("conv", "sliding_attention", "full_attention")
ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def build(w: Weights) -> Model:
    config = w.config
    shape = replace(Shape.of(config), eps=config.float("norm_eps", low=0.0, high=1.0, default=1e-5))
    inner = config.int("intermediate_size", low=1, high=MOST)
    kinds, window = _kinds(config, shape.layers), config.int("sliding_window", low=1, default=None)
    settings = Fields({**config, "rope_parameters": config.get("rope_parameters") or ROPES}, config.where)
    full, local = (rope.to(w.device) for rope in ropes_by_kind(settings, shape.head_dim, theta=1e6, local_theta=1e4))
    gated = config.bool("use_attention_gate", default=True)
    sandwich = config.bool("use_sandwich_norm", default=True)

    def layer_norm(name: str) -> Norm:
        return norm(w, f"{name}.weight", shape.hidden, shape.eps)

    def mixer(index: int, layer: str) -> Mixer:
        if kinds[index] == "conv":
            return short_conv(w, f"{layer}.conv", shape, kernel=7)
        prefix = f"{layer}.self_attn"
        gate = there(w, f"{prefix}.g_proj.weight", f"{prefix}.gate_proj.weight").split(".")[-2] if gated else None
        q_norm, k_norm = (norm(w, f"{prefix}.{part}_norm.weight", shape.head_dim, shape.eps) for part in "qk")
        rope, seen = (local, window) if kinds[index] == "sliding_attention" else (full, None)
        return attention(w, prefix, shape, rope, window=seen, q_norm=q_norm, k_norm=k_norm, head_gate=gate)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, layer),
            mlp(w, f"{layer}.feed_forward", shape.hidden, inner, "silu", W1_W3_W2),
            layer_norm(f"{layer}.operator_norm"),
            layer_norm(f"{layer}.ffn_norm"),
            layer_norm(f"{layer}.post_operator_norm") if sandwich else None,
            layer_norm(f"{layer}.post_ffn_norm") if sandwich else None,
        )

    return decoder(w, shape, block, final_norm=layer_norm("model.embedding_norm"))


def _kinds(config: Fields, layers: int) -> Sequence[str]:
    """Each layer's kind; without a list every second one attends, but for the first, by turns far and near."""
    plan = {2: "full_attention", 0: "sliding_attention"}
    default = [plan.get(index % 4, "conv") if index else "conv" for index in range(layers)]
    return config.strs("layer_types", layers, KINDS, default=default)
