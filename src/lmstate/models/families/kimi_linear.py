"""Kimi Linear (2510.26692): a delta rule with a decay a channel, latent attention without positions, and experts.

x = embed(tokens)
x = x + mixer(norm(x))                                      # the delta rule, or latent attention
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x); the first layers: an MLP
logits = head(norm(x))

Heads for multi-token prediction (`model.mtp.*`, or layers past the last) are not run, and their weights are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.families.deepseek import latent_attention
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.gated_delta_net import GatedDelta
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {"kimi_linear": {**b.EPS, "routed_scaling_factor": 2.446}}

KINDS = ("linear_attention", "full_attention")


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    # The published config keeps what is linear apart; transformers saves it flat.
    published = config.fields("linear_attn_config")
    linear = published or Config(
        {
            "head_dim": config.get("linear_head_dim"),
            "num_heads": config.get("linear_num_heads"),
            "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
        },
        config.where,
    )
    kinds = config.strs("layer_types", shape.layers, KINDS, default=None) or _kinds(linear, shape.layers)
    ffns = config.strs("mlp_layer_types", shape.layers, ("dense", "sparse"), default=None)
    dense = config.int("first_k_dense_replace", default=1)
    rope_dim = config.int("qk_rope_head_dim", low=1, high=b.MAX_SIZE)
    scale = (config.int("qk_nope_head_dim", low=1, high=b.MAX_SIZE) + rope_dim) ** -0.5

    def mixer(index: int, prefix: str) -> Mixer:
        if kinds[index] == "linear_attention":
            return delta(w, prefix, shape, linear)
        return latent_attention(w, prefix, shape, None, rope_dim, scale)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        is_dense = ffns[index] == "dense" if ffns else index < dense
        return Block(
            mixer(index, f"{layer}.self_attn"),
            feed_forward(w, layer, shape, is_dense),
            b.norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            b.norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )

    return b.decoder(w, shape, block, ignore=b.mtp_tensors(config, shape))


def _kinds(linear: Config, layers: int) -> Sequence[str]:
    """Each layer's kind, from lists of layers that count from 1; without them every fourth has attention."""
    attends = linear.ints("full_attn_layers", low=1, high=layers, default=None)
    recurs = linear.ints("kda_layers", low=1, high=layers, default=None)
    if attends is None or recurs is None:
        return [KINDS[index % 4 == 0 and index > 0] for index in range(layers)]
    if sorted((*attends, *recurs)) != list(range(1, layers + 1)):
        raise ModelError(f"{linear.where}: full_attn_layers and kda_layers must name each of {layers} layers once")
    return [KINDS[index + 1 in attends] for index in range(layers)]


def delta(w: WeightLoader, prefix: str, shape: b.Dims, linear: Config) -> GatedDelta:
    heads = linear.int("num_heads", low=1, high=b.MAX_SIZE, default=32)
    dim = linear.int("head_dim", low=1, high=b.MAX_SIZE, default=128)
    kernel = linear.int("short_conv_kernel_size", low=1, high=256, default=4)
    return b.channel_delta(w, prefix, shape, heads, dim, kernel)


def feed_forward(w: WeightLoader, layer: str, shape: b.Dims, dense: bool) -> FeedForward:
    config, act, hidden = w.config, b.activation(w.config), shape.hidden
    if dense:
        gate = b.first_present(w, f"{layer}.mlp.gate_proj.weight", f"{layer}.block_sparse_moe.gate_proj.weight")
        inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE)
        return b.mlp(w, gate.removesuffix(".gate_proj.weight"), hidden, inner, act)
    count = b.expert_count(config)
    gate = b.first_present(w, f"{layer}.block_sparse_moe.gate.weight", f"{layer}.mlp.gate.weight")
    prefix = gate.removesuffix(".gate.weight")
    groups = config.int("num_expert_group", low=1, high=b.MAX_SIZE, default=1)
    router = Router(
        b.router_weight(w, gate, count, hidden),
        b.top_k(config, count, "num_experts_per_token"),
        "sigmoid",
        config.bool("moe_renormalize", default=True),
        config.float("routed_scaling_factor", default=1.0),
        e_score_correction_bias=w.tensor(f"{prefix}.gate.e_score_correction_bias", (count,)),
        groups=groups,
        topk_groups=config.int("topk_group", low=1, high=groups, default=1),
        group_score="top2",
    )
    inner = config.int("moe_intermediate_size", low=1, high=b.MAX_SIZE)
    common = inner * config.int("num_shared_experts", high=1024, default=1)
    return MixtureOfExperts(
        router,
        b.experts(w, f"{prefix}.experts", count, hidden, inner, act, b.W1_W3_W2),
        b.mlp(w, f"{prefix}.shared_experts", hidden, common, act) if common else None,
    )
