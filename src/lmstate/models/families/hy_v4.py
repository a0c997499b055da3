"""Hunyuan 4: wide residual streams, gated latent attention with sinks to chosen positions, and clamped experts.

s = [embed(tokens)] * N    # N streams
s = mixed(s) + w * attention(norm(mix(s)))
s = mixed(s) + w' * experts(norm(mix'(s)))
logits = head(norm(mix''(s)))

A block's parts read one mixture of the streams, and what they give is added to each stream with a weight of its own.
Layers share the choice of positions of an earlier one.
"""

from __future__ import annotations

import re
from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.renamed import Renamed
from lmstate.models.families import builders as b
from lmstate.models.families.deepseek import (
    choice_sources,
    choosing_layers,
    latent_attention,
    latent_scale,
    position_index,
)
from lmstate.models.layers.hyper_connection import HyperBlock, RepeatedEmbedding
from lmstate.models.layers.mlp import MLP, ClampedMLP, FeedForward
from lmstate.models.layers.position_index import EarlierChoice, PositionIndex
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {
    "hy_v4": {
        **b.EPS,
        "vocab_size": 120_832,
        "hidden_size": 2816,
        "intermediate_size": 6912,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.827,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "index_n_heads": 16,
        "index_topk_freq": 4,
    }
}
# How parts are called in files, and here.
PARTS = (
    (r"\.hc_pre\.", "."),
    (r"\.learnable_sink_param$", ".sinks"),
    (r"\.linear_gate\.", ".gate_proj."),
    (r"\.hc_attn_layer\.hc_", ".attn_hc."),
    (r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
    (r"\.hc_head_(fn|base|scale)$", r".hc_\1"),
)


def build(w: WeightLoader) -> Model:
    w = w.over(Renamed(w.source, [(_plain(name), name) for name in w.source.names()], w.source.config))
    w.config = config = b.completed(w.config, DEFAULTS["hy_v4"])
    shape = b.Dims.of(config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope_dim = config.int("qk_rope_head_dim", low=2, high=b.MAX_SIZE)
    rope = make_rope(config, rope_dim).to(w.device)
    values = shape.heads * config.int("v_head_dim", low=1, high=b.MAX_SIZE)
    limit = config.float("swiglu_limit", low=1e-6, default=10.0)
    normed, sparse = b.rms_norms(w, shape), b.sparse_layers(config, shape.layers)
    chooses = choosing_layers(config, shape.layers)
    eps = config.float("hc_eps", low=0.0, default=1e-6)
    count = config.int("hc_mult", low=1, high=64, default=4)
    streams = b.Streams(count, eps, config.float("hc_magnitude", default=2.0), output_eps=eps)
    indexes: list[PositionIndex] = []

    def clamped(expert: FeedForward) -> FeedForward:
        assert isinstance(expert, MLP)
        return ClampedMLP(expert, limit)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not sparse[index]:
            return b.mlp(w, prefix, shape.hidden, inner, act)
        mixture = b.deepseek_mixture(w, prefix, shape)
        return replace(mixture, experts=[clamped(expert) for expert in mixture.experts])

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        if chooses[index]:
            found = position_index(w, f"{attention}.indexer", shape, rope, interleaved=False, eps=shape.eps)
            indexes.append(replace(found, rotates_last=True))
        mixer = latent_attention(
            w, attention, shape, rope, rope_dim, latent_scale(config), gates=("gate_proj", values)
        )  # fmt: skip
        last = indexes[-1]
        return HyperBlock(
            replace(
                mixer,
                sinks=w.tensor(f"{attention}.sinks", (shape.heads,)),
                index=last if chooses[index] else EarlierChoice(last.name, last.budget),
            ),
            feed_forward(index, f"{layer}.mlp"),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            around_mixer=b.hyper_connection(w, f"{layer}.attn_hc", shape, streams),
            around_mlp=b.hyper_connection(w, f"{layer}.ffn_hc", shape, streams),
        )

    return b.decoder(
        w,
        shape,
        block,
        entry=RepeatedEmbedding(count),
        exit=b.hyper_head(w, "model.hc_head", shape, streams),
        reads=choice_sources(chooses),
        ignore=("model.mtp_layers.*",),
    )


def _plain(name: str) -> str:
    for there, here in PARTS:
        name = re.sub(there, here, name)
    return name
