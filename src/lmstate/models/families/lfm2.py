"""LFM2 (Liquid AI): gated short convolutions in most layers, attention in the others; dense or with experts.

x = embed(tokens)
x = x + mixer(norm(x))    # a gated short convolution, or attention
x = x + mlp(norm(x))      # or experts
logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.layers.short_conv import ShortConv
from lmstate.models.model import Block, Model
from lmstate.ops.weights.grouped import FloatWeight

DEFAULTS: b.Defaults = {}

KINDS = ("conv", "full_attention")


def build(w: WeightLoader) -> Model:
    config = w.config
    shape = replace(b.Dims.of(config), eps=config.float("norm_eps", low=0.0, high=1.0, default=1e-5))
    rope = make_rope(config, shape.head_dim, theta=1e6).to(w.device)
    kinds, inner, normed = _kinds(config, shape.layers), _inner(config), b.rms_norms(w, shape)
    dense = config.int("num_dense_layers", default=2) if b.expert_count(config) else shape.layers

    def mixer(index: int, layer: str) -> Mixer:
        if kinds[index] == "conv":
            return short_conv(w, f"{layer}.conv", shape)
        q_norm, k_norm = b.head_norms(w, f"{layer}.self_attn", shape, ("q_layernorm", "k_layernorm"))
        return b.attention(w, f"{layer}.self_attn", shape, rope, q_norm=q_norm, k_norm=k_norm, out="out_proj")

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if index < dense:
            return b.mlp(w, prefix, shape.hidden, inner, "silu", b.W1_W3_W2)
        return mixture(w, prefix, shape)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, layer),
            feed_forward(index, f"{layer}.feed_forward"),
            normed(f"{layer}.operator_norm"),
            normed(f"{layer}.ffn_norm"),
        )

    return b.decoder(w, shape, block, final_norm=normed("model.embedding_norm"))


def _kinds(config: Config, layers: int) -> Sequence[str]:
    """Each layer's kind; older configs list the layers of attention."""
    kinds = config.strs("layer_types", layers, KINDS, default=None)
    attends = config.ints("full_attn_idxs", default=range(layers))
    return kinds or [KINDS[index in attends] for index in range(layers)]


def _inner(config: Config) -> int:
    """The width inside the feed-forward blocks, which a config of the dense model gives before its adjustment."""
    inner = config.int("block_ff_dim", low=1, high=b.MAX_SIZE, default=0) or config.int(
        "intermediate_size", low=1, high=b.MAX_SIZE
    )
    if config.str("model_type") != "lfm2" or not config.bool("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = int(2 * inner / 3)
    inner = int(config.float("block_ffn_dim_multiplier", low=1e-3, high=1e3, default=1.0) * inner)
    multiple = config.int("block_multiple_of", low=1, high=b.MAX_SIZE, default=256)
    return multiple * -(-inner // multiple)


def short_conv(w: WeightLoader, prefix: str, shape: b.Dims, *, kernel: int = 3) -> ShortConv:
    """`kernel`: of the convolution, where the config does not say."""
    kernel = w.config.int("conv_L_cache", low=1, high=256, default=kernel)
    return ShortConv(
        w.linear(f"{prefix}.in_proj.weight", shape=(3 * shape.hidden, shape.hidden)),
        w.linear(f"{prefix}.out_proj.weight", shape=(shape.hidden, shape.hidden)),
        w.tensor(f"{prefix}.conv.weight", (shape.hidden, 1, kernel))[:, 0],
        b.biases(w, f"{prefix}.conv.bias"),
        b.biases(w, f"{prefix}.in_proj.bias"),
        b.biases(w, f"{prefix}.out_proj.bias"),
    )


def mixture(w: WeightLoader, prefix: str, shape: b.Dims) -> MixtureOfExperts:
    config, count = w.config, b.expert_count(w.config)
    router = Router(
        FloatWeight(w.tensor(f"{prefix}.gate.weight", (count, shape.hidden))),
        config.int("num_experts_per_tok", low=1, high=count),
        "sigmoid",
        config.bool("norm_topk_prob", default=True),
        config.float("routed_scaling_factor", default=1.0),
        e_score_correction_bias=w.tensor(f"{prefix}.expert_bias", (count,))
        if config.bool("use_expert_bias", default=True)
        else None,
        floor=1e-6,
    )
    inner = config.int("moe_intermediate_size", low=1, high=b.MAX_SIZE)
    return MixtureOfExperts(router, b.experts(w, f"{prefix}.experts", count, shape.hidden, inner, "silu", b.W1_W3_W2))
