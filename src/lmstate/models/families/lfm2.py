"""LFM2 (Liquid AI): gated short convolutions in most layers, attention in the others; dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmstate.models.decoder import Block, Model
from lmstate.models.families.common import MOST, Shape, attention, biases, decoder, norm
from lmstate.models.mixers.mixer import Mixer
from lmstate.models.mixers.short_conv import ShortConv
from lmstate.models.mlp import MLP, FeedForward
from lmstate.models.rope import make_rope
from lmstate.models.weights.fields import Fields
from lmstate.models.weights.weights import Weights

KINDS = ("conv", "full_attention")


def build(w: Weights) -> Model:
    config = w.config
    shape = replace(Shape.of(config), eps=config.float("norm_eps", low=0.0, high=1.0, default=1e-5))
    rope = make_rope(config, shape.head_dim, theta=1e6)
    kinds, inner = _kinds(config, shape.layers), _inner(config)

    def mixer(index: int, layer: str) -> Mixer:
        if kinds[index] == "conv":
            return short_conv(w, f"{layer}.conv", shape)
        q_norm, k_norm = (
            norm(w, f"{layer}.self_attn.{part}_layernorm.weight", shape.head_dim, shape.eps) for part in "qk"
        )
        return attention(w, f"{layer}.self_attn", shape, rope, q_norm=q_norm, k_norm=k_norm, out="out_proj")

    def feed_forward(index: int, layer: str) -> FeedForward:
        return mlp(w, f"{layer}.feed_forward", shape.hidden, inner)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, layer),
            feed_forward(index, layer),
            norm(w, f"{layer}.operator_norm.weight", shape.hidden, shape.eps),
            norm(w, f"{layer}.ffn_norm.weight", shape.hidden, shape.eps),
        )

    final = norm(w, "model.embedding_norm.weight", shape.hidden, shape.eps)
    return decoder(w, shape, block, final_norm=final)


def _kinds(config: Fields, layers: int) -> Sequence[str]:
    """Each layer's kind; older configs list the layers of attention."""
    kinds = config.strs("layer_types", layers, KINDS, default=None)
    attends = config.ints("full_attn_idxs", default=range(layers))
    return kinds or [KINDS[index in attends] for index in range(layers)]


def _inner(config: Fields) -> int:
    """The width inside the feed-forward blocks, which a config of the dense model gives before its adjustment."""
    inner = config.int("block_ff_dim", low=1, high=MOST, default=0) or config.int("intermediate_size", low=1, high=MOST)
    if config.str("model_type") != "lfm2" or not config.bool("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = int(2 * inner / 3)
    inner = int(config.float("block_ffn_dim_multiplier", low=1e-3, high=1e3, default=1.0) * inner)
    multiple = config.int("block_multiple_of", low=1, high=MOST, default=256)
    return multiple * -(-inner // multiple)


def short_conv(w: Weights, prefix: str, shape: Shape) -> ShortConv:
    kernel = w.config.int("conv_L_cache", low=1, high=256, default=3)
    return ShortConv(
        w.linear(f"{prefix}.in_proj.weight", shape=(3 * shape.hidden, shape.hidden)),
        w.linear(f"{prefix}.out_proj.weight", shape=(shape.hidden, shape.hidden)),
        w.tensor(f"{prefix}.conv.weight", (shape.hidden, 1, kernel))[:, 0],
        biases(w, f"{prefix}.conv.bias"),
        biases(w, f"{prefix}.in_proj.bias"),
        biases(w, f"{prefix}.out_proj.bias"),
    )


def mlp(w: Weights, prefix: str, hidden: int, inner: int) -> MLP:
    """`w2(silu(w1 x) * w3 x)`"""
    return MLP(
        w.linear(f"{prefix}.w1.weight", f"{prefix}.w3.weight", shape=(2 * inner, hidden)),
        w.linear(f"{prefix}.w2.weight", shape=(hidden, inner)),
    )
