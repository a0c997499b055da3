"""Falcon-H1: attention and Mamba-2 side by side in every layer, with a multiplier at nearly every place (muP).

x = m_e * embed(tokens)
y = norm(x)
x = x + m_a * attention(y) + m_s * mamba2(y)
x = x + mlp(norm(x))
logits = m_h * head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mamba2 import Mamba2
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.parallel_hybrid import ParallelHybrid
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {"falcon_h1": b.EPS}


def build(w: WeightLoader) -> Model:
    """Multipliers that a product or a norm does not undo are moved to where they cost nothing."""
    config, shape = w.config, b.Dims.of(w.config)
    sizes = b.Mamba2Shape.of(config, shape)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope = make_rope(config, shape.head_dim).to(w.device)
    gate_scale, down_scale = config.floats("mlp_multipliers", 2, default=(1.0, 1.0))
    into, out_of = _multiplier(config, "attention_in_multiplier"), _multiplier(config, "attention_out_multiplier")
    # Scaling the input of attention scales queries and keys, so the scores twice, and values, so the output.
    scale = shape.head_dim**-0.5 * into**2 * _multiplier(config, "key_multiplier")
    # Sizes that a config makes up are found out before there is as much of anything.
    projected = 2 * sizes.inner + 2 * sizes.groups * sizes.state_size + sizes.heads
    w.expect("model.layers.0.mamba.in_proj.weight", (projected, shape.hidden))
    w.expect("model.layers.0.feed_forward.gate_proj.weight", (inner, shape.hidden))
    features = _feature_scale(config, sizes).to(w.device)
    # Scaling what comes down is scaling what goes up beside the gate.
    factors = torch.tensor([gate_scale, down_scale], dtype=torch.float32, device=w.device).repeat_interleave(inner)

    def seen(layer: str) -> Attention:
        plain = b.attention(w, f"{layer}.self_attn", shape, rope, scale=scale)
        return replace(plain, qkv_bias=_divided(plain.qkv_bias, into), out_bias=_divided(plain.out_bias, into))

    def space(layer: str) -> Mamba2:
        gated = None
        if config.bool("mamba_rms_norm", default=False):
            gate_last = config.bool("mamba_norm_before_gate", default=True)
            gated = b.gated_norm(w, f"{layer}.mamba.norm.weight", sizes, gate_last=gate_last)
        plain = b.mamba2(w, f"{layer}.mamba", sizes, shape.hidden, norm=gated)
        within = _multiplier(config, "ssm_in_multiplier")
        return replace(plain, scale=features * within, bias=_divided(plain.bias, within))

    def feed_forward(prefix: str) -> MLP:
        plain = b.mlp(w, prefix, shape.hidden, inner, act)
        return replace(plain, factors=factors, down_bias=_divided(plain.down_bias, 1 / down_scale))

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            ParallelHybrid(seen(layer), space(layer), into * out_of, _multiplier(config, "ssm_out_multiplier")),
            feed_forward(f"{layer}.feed_forward"),
            b.norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            b.norm(w, f"{layer}.pre_ff_layernorm.weight", shape.hidden, shape.eps),
        )

    return b.decoder(
        w,
        shape,
        block,
        final_norm=b.norm(w, "model.final_layernorm.weight", shape.hidden, shape.eps),
        embed_scale=_multiplier(config, "embedding_multiplier"),
        logit_scale=_multiplier(config, "lm_head_multiplier"),
    )


def _multiplier(config: Config, name: str) -> float:
    return config.float(name, low=1e-9, high=1e9, default=1.0)


def _divided(bias: Tensor | None, by: float) -> Tensor | None:
    return None if bias is None else bias / by


def _feature_scale(config: Config, sizes: b.Mamba2Shape) -> Tensor:
    """The factor on each feature that a Mamba-2 projects: one on all of gate, x, B, C and dt each."""
    groups = sizes.groups * sizes.state_size
    factors = config.floats("ssm_multipliers", 5, default=(1.0,) * 5)
    return torch.tensor(factors, dtype=torch.float32).repeat_interleave(
        torch.tensor([sizes.inner, sizes.inner, groups, groups, sizes.heads])
    )
