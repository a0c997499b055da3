"""Qwen3, dense and mixture of experts: queries and keys are normalised head by head before they rotate."""

from __future__ import annotations

from lmstate.models.decoder import Block, Model
from lmstate.models.families.common import (
    MOST,
    Shape,
    activation,
    attention,
    decoder,
    expert_count,
    experts,
    mlp,
    norm,
    one_window,
    windows,
)
from lmstate.models.mlp import FeedForward
from lmstate.models.moe import MixtureOfExperts, Router
from lmstate.models.rope import make_rope
from lmstate.models.weights.weights import Weights
from lmstate.ops import FloatWeight


def build(w: Weights) -> Model:
    config, shape = w.config, Shape.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), windows(config, shape.layers)
    if config.str("model_type") == "qwen3_moe":  # its config may name layers, which its published code does not ask
        window = [one_window(config, switch=True)] * shape.layers
    count = expert_count(config)
    dense = config.ints("mlp_only_layers", default=()) or ()
    every = config.int("decoder_sparse_step", low=1, default=1)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not count or index in dense or (index + 1) % every:
            return mlp(w, prefix, shape.hidden, inner, act)
        router = Router(
            FloatWeight(w.tensor(f"{prefix}.gate.weight", (count, shape.hidden))),
            config.int("num_experts_per_tok", low=1, high=count),
            normalise=config.bool("norm_topk_prob", default=False),
        )
        width = config.int("moe_intermediate_size", low=1, high=MOST)
        return MixtureOfExperts(router, experts(w, f"{prefix}.experts", count, shape.hidden, width, act))

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        q_norm, k_norm = (norm(w, f"{layer}.self_attn.{part}_norm.weight", shape.head_dim, shape.eps) for part in "qk")
        return Block(
            attention(w, f"{layer}.self_attn", shape, rope, window=window[index], q_norm=q_norm, k_norm=k_norm),
            feed_forward(index, f"{layer}.mlp"),
            norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )

    return decoder(w, shape, block)
