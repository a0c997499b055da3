"""AFMoE (Arcee's Trinity): gated attention with positions only where it has a window, and norms around both parts.

x = embed(tokens)                         # * sqrt(E) with muP
x = x + norm(gated attention(norm(x)))    # rotary where there is a window
x = x + norm(experts(norm(x)))            # sigmoid scores, a shared expert; the first layers: an MLP
logits = head(norm(x))
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import Router
from lmstate.models.layers.rope import Rope, make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {"afmoe": {**b.EPS, "head_dim": 128, "sliding_window": 1024}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act, count = (
        config.int("intermediate_size", low=1, high=b.MAX_SIZE),
        b.activation(config),
        b.expert_count(config),
    )
    every = config.int("global_attn_every_n_layers", low=1, default=4)
    window = b.layer_windows(config, shape.layers, full_every=every, switch=False)
    rope = make_rope(config, shape.head_dim).to(w.device)
    dense = config.int("num_dense_layers", default=1)
    shared = config.int("num_shared_experts", high=b.MAX_SIZE, default=2)
    config.str("score_func", allowed=("sigmoid",), default="sigmoid")
    normed = b.rms_norms(w, shape)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if index < dense:
            return b.mlp(w, prefix, shape.hidden, inner, act)
        router = Router(
            b.router_weight(w, f"{prefix}.router.gate.weight", count, shape.hidden),
            b.top_k(config, count),
            "sigmoid",
            normalize=config.bool("route_norm", default=True),
            scale=config.float("route_scale", default=1.0),
            e_score_correction_bias=w.tensor(f"{prefix}.expert_bias", (count,)),
        )
        return b.deepseek_mixture(w, prefix, shape, router, shared=shared)

    def block(index: int) -> Block:
        layer, size = f"model.layers.{index}", window[index]
        return Block(
            gated_attention(w, f"{layer}.self_attn", shape, None if size is None else rope, size),
            feed_forward(index, f"{layer}.mlp"),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.pre_mlp_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            normed(f"{layer}.post_mlp_layernorm"),
        )

    embed_scale = shape.hidden**0.5 if config.bool("mup_enabled", default=False) else 1.0
    return b.decoder(w, shape, block, embed_scale=embed_scale)


def gated_attention(w: WeightLoader, prefix: str, shape: b.Dims, rope: Rope | None, window: int | None) -> Attention:
    """Attention whose gate is a projection of its own, `gate_proj`, as wide as the query's."""
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    qkv = w.linear(
        *(f"{prefix}.{part}_proj.weight" for part in ("q", "gate", "k", "v")),
        shape=((width, width, kv_width, kv_width), shape.hidden),
        order=lambda: _by_head(shape),
    )
    wanted = w.config.bool("attention_bias", default=False)
    bias = b.biases(w, *(f"{prefix}.{part}_proj.bias" for part in "qkv"), wanted=wanted)
    if bias is not None:  # the gate has none
        bias = torch.cat([bias[:width], bias.new_zeros(width), bias[width:]])[_by_head(shape).to(bias.device)]
    q_norm, k_norm = b.head_norms(w, prefix, shape)
    return Attention(
        qkv,
        w.linear(f"{prefix}.o_proj.weight", shape=(shape.hidden, width)),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim**-0.5,
        rope,
        window,
        q_norm=q_norm,
        k_norm=k_norm,
        qkv_bias=bias,
        out_bias=b.biases(w, f"{prefix}.o_proj.bias", wanted=wanted),
        gate=True,
    )


def _by_head(shape: b.Dims) -> Tensor:
    """The order of rows in which each head's gate follows its query; stored are all queries, all gates, keys, values.

    int64 `[2 * H * D + 2 * K * D]`
    """
    rows = torch.arange(2 * (shape.heads + shape.kv_heads) * shape.head_dim)
    gated, others = rows.tensor_split([2 * shape.heads * shape.head_dim])
    both = gated.view(2, shape.heads, shape.head_dim).transpose(0, 1)  # [H, 2, D]
    return torch.cat([both.flatten(), others])
