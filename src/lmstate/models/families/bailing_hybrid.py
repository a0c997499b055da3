"""Ling 3.0 (`bailing_hybrid`): a delta rule with a decay a channel, gated latent attention, and experts in groups.

x = embed(tokens)
x = x + mixer(norm(x))                                      # the delta rule; in every sixth layer latent attention
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x); the first layers: an MLP
logits = head(norm(x))

A head for multi-token prediction is in a layer past the last, whose kind its tensors tell.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.renamed import Renamed
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.families.deepseek import latent_attention, latent_scale
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.rope import make_rope, rope_fields
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "bailing_hybrid": {
        "vocab_size": 157_184,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 2,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    }
}

# Fields that go by two names: the one that other families have too, another; and what they are where neither is there.
NAMES: tuple[tuple[str, str, Any], ...] = (
    ("n_group", "num_expert_group", 8),
    ("num_experts_per_tok", "num_experts_per_token", 8),
    ("norm_topk_prob", "moe_renormalize", True),
    ("n_shared_experts", "num_shared_experts", 1),
    ("num_experts", "num_local_experts", 512),
    ("num_nextn_predict_layers", "num_mtp_layers", 1),
    (b.POSITIONS, "model_max_length", 262_144),
)
# How parts are called in files, and here.
PARTS = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)
KINDS = ("linear_attention", "full_attention")


def build(w: WeightLoader) -> Model:
    w = w.over(Renamed(w.source, [(_plain(name), name) for name in w.source.names()], w.source.config))
    w.config = config = _named(b.completed(w.config, DEFAULTS["bailing_hybrid"]))
    if not any(name.endswith(".dt_bias") for name in w.source.names()):
        raise ModelError(
            f"{w.source.path}: none of its layers has the delta rule of Ling 3.0. Earlier models of this name have "
            "lightning attention instead, and are not supported"
        )
    shape = b.Dims.of(config)
    every = config.int("layer_group_size", low=1, default=6)
    kinds = config.strs("layer_types", shape.layers, KINDS, default=None) or [
        KINDS[(index + 1) % every == 0] for index in range(shape.layers)
    ]
    rope_dim = config.int("qk_rope_head_dim", low=2, high=b.MAX_SIZE)
    rope = make_rope(_whole(config), rope_dim, theta=6e6, interleaved=True).to(w.device)
    floor = None
    if config.bool("kda_safe_gate", default=True):
        floor = config.float("kda_lower_bound", high=0.0, default=-5.0)
    # The head_dim that transformers saves is that of the rope; the one of the delta rule then has a field of its own.
    heads = config.int("linear_num_heads", low=1, high=b.MAX_SIZE, default=shape.heads)
    head_dim = config.int("linear_head_dim", low=1, high=b.MAX_SIZE, default=shape.head_dim)
    kernel = config.int("short_conv_kernel_size", low=1, high=256, default=4)
    kernel = config.int("linear_conv_kernel_dim", low=1, high=256, default=kernel)

    def mixer(index: int, prefix: str) -> Mixer:
        full = kinds[index] == KINDS[1] if index < shape.layers else w.has(f"{prefix}.kv_a_proj_with_mqa.weight")
        if not full:
            return b.channel_delta(w, prefix, shape, heads, head_dim, kernel, floor=floor)
        return latent_attention(w, prefix, shape, rope, rope_dim, latent_scale(config), gates=("g_proj", shape.heads))

    normed = b.rms_norms(w, shape)
    block = b.pre_norm(normed, mixer, b.deepseek_feed_forward(w, shape))
    names = b.layers_past_the_last(w, shape.layers)
    predicting = b.prediction_heads(w, shape, normed, names, partial(block, shape.layers))
    return b.decoder(w, shape, block, heads=predicting, ignore=b.mtp_tensors(config, shape))


def _plain(name: str) -> str:
    for there, here in PARTS:
        name = re.sub(there, here, name)
    return name


def _named(config: Config) -> Config:
    """The config with every field of `NAMES` under the first of its names."""
    values = dict(config)
    for name, other, default in NAMES:
        given = [config[each] for each in (name, other) if config.given(each)]
        values[name] = given[0] if given else default
    return Config(values, config.where)


def _whole(config: Config) -> Config:
    """The config for its rope: a default one turns all features, whatever part of them it names."""
    rope = rope_fields(config)
    if rope.str("rope_type") != "default":
        return config
    return Config(
        {**config, "rope_parameters": {**rope, "partial_rotary_factor": None}, "partial_rotary_factor": None},
        config.where,
    )
