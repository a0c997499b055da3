"""Inkling (Thinking Machines): attention by content and distance, and short convolutions behind every part.

x = norm(embed(tokens))
x = x + conv(attention(norm(x)))                            # keys and values convolved; a score by distance
x = x + conv(sum over chosen e: g_e * expert_e(norm(x)))    # some experts always; or an MLP
logits = scale * head(norm(x))

A convolution adds its input to what it gives. Layers with a window have other sizes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.source import floats
from lmstate.models.families import builders as b
from lmstate.models.layers.embedding import NormedEmbedding
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.layers.relative_attention import (
    ConvolvedLayer,
    LogTemperature,
    RelativeAttention,
    ShortTaps,
    SinkRouter,
)
from lmstate.models.model import Block, Model
from lmstate.ops import FloatWeight

DEFAULTS: b.Defaults = {
    "inkling_text": {
        "vocab_size": 201_024,
        "hidden_size": 6144,
        "num_hidden_layers": 66,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 16,
        "swa_head_dim": 128,
        "sliding_window_size": 512,
        "d_rel": 16,
        "rel_extent": 1024,
        "conv_kernel_size": 4,
        "intermediate_size": 24_576,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "route_scale": 8.0,
        "logits_mup_width_multiplier": 24.0,
    }
}
FULL, SLIDING = "hybrid", "hybrid_sliding"
MAX_EXTENT = 2**16


def build(w: WeightLoader) -> Model:
    config = w.config
    shape, kinds = b.Dims.of(config), _kinds(config)
    mixtures = config.strs("mlp_layer_types", shape.layers, ("dense", "sparse"), default=None) or [
        "dense" if index < config.int("dense_mlp_idx", low=0, default=0) else "sparse" for index in range(shape.layers)
    ]
    inner, act, width = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config), 0
    width = b.expert_width(config)
    if config.given("dense_intermediate_size"):  # then the other one is that of the experts
        inner, width = config.int("dense_intermediate_size", low=1, high=b.MAX_SIZE), inner
    normed = b.rms_norms(w, shape)

    def mlp(prefix: str) -> MLP:
        return b.mlp(w, prefix, shape.hidden, inner, act, biased=False)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        sparse = mixtures[index] == "sparse"
        fed = _taps(w, f"{layer}.mlp_sconv", shape.hidden)
        if not sparse:  # the factor of an MLP's output
            fed = fed * w.tensor(f"{layer}.mlp.global_scale", (1,))
        made = ConvolvedLayer(
            _attention(w, f"{layer}.self_attn", shape, kinds[index] == SLIDING),
            ShortTaps(_taps(w, f"{layer}.attn_sconv", shape.hidden)),
            _mixture(w, f"{layer}.mlp", shape, width, act) if sparse else mlp(f"{layer}.mlp"),
            normed(f"{layer}.post_attention_layernorm"),
            ShortTaps(fed),
        )
        return Block(made, None, normed(f"{layer}.input_layernorm"))

    answered = config.int("unpadded_vocab_size", low=1, high=shape.vocab, default=shape.vocab)
    head = None
    if w.has("lm_head.weight") and w.shape("lm_head.weight")[0] != answered:  # rows of no token
        label, whole = "lm_head.weight, without padding", (shape.vocab, shape.hidden)
        w.expect("lm_head.weight", whole)
        head = w.derived(
            label, "lm_head.weight", make=lambda rows: floats(rows)[:answered], shape=(answered, shape.hidden)
        )
    return b.decoder(
        w,
        replace(shape, vocab=answered),
        block,
        head=head,
        marks=shape.vocab - answered,
        logit_scale=1.0 / config.float("logits_mup_width_multiplier", low=1e-6, high=1e6),
        entry=NormedEmbedding(normed("model.embed_tokens.embed_norm")),
    )


def _kinds(config: Config) -> list[str]:
    layers = config.int("num_hidden_layers", low=1, high=4096)
    given = config.strs("layer_types", layers, (FULL, SLIDING), default=None)
    if given is not None:
        return list(given)
    slides = config.ints("local_layer_ids", default=tuple(index for index in range(layers) if (index + 1) % 6))
    return [SLIDING if index in slides else FULL for index in range(layers)]


def _taps(w: WeightLoader, name: str, width: int) -> Tensor:
    """The taps of a convolution that adds its input, `[width, C]`."""
    taps = b.convolution(w, f"{name}.conv1d.weight", width, w.config.int("conv_kernel_size", low=1, high=256)).clone()
    taps[:, -1] += 1.0
    return taps


def _attention(w: WeightLoader, prefix: str, shape: b.Dims, slides: bool) -> RelativeAttention:
    config, of = w.config, "swa_" if slides else ""
    heads, kv_heads, dim = (
        config.int(f"{of}{name}", low=1, high=b.MAX_SIZE)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shape = replace(shape, heads=heads, kv_heads=kv_heads, head_dim=dim)
    window = config.int("sliding_window_size", low=1, high=MAX_EXTENT) if slides else None
    extent = window or config.int("rel_extent", low=1, high=MAX_EXTENT)
    relative, kv_width = config.int("d_rel", low=1, high=b.MAX_SIZE), kv_heads * dim
    names = [f"{prefix}.{part}_proj.weight" for part in "qkvr"]
    floor = config.int("log_scaling_n_floor", low=1, default=None)
    bank = w.tensor(f"{prefix}.rel_logits_proj.proj", (relative, extent)).T
    q_norm, k_norm = b.head_norms(w, prefix, shape)
    return RelativeAttention(
        w.linear(*names, shape=((heads * dim, kv_width, kv_width, heads * relative), shape.hidden)),
        w.linear(f"{prefix}.o_proj.weight", shape=(shape.hidden, heads * dim)),
        heads,
        kv_heads,
        dim,
        1.0 / dim,
        q_norm,
        k_norm,
        FloatWeight(torch.cat([bank, bank.new_zeros(1, relative)])),
        ShortTaps(torch.cat([_taps(w, f"{prefix}.{part}_sconv", kv_width) for part in "kv"])),
        window,
        None if slides or floor is None else LogTemperature(floor, config.float("log_scaling_alpha", default=0.1)),
    )


def _mixture(w: WeightLoader, prefix: str, shape: b.Dims, width: int, act: str) -> MixtureOfExperts:
    config, count = w.config, b.expert_count(w.config)
    always, hidden = config.int("n_shared_experts", low=1, high=b.MAX_SIZE), shape.hidden
    shared = [f"{prefix}.shared_experts.{part}_proj" for part in ("gate", "up", "down")]
    stacked = w.has(shared[0])  # else each is one of its own, as in GGUF
    for name, size in zip(shared, ((width, hidden), (width, hidden), (hidden, width))):
        if stacked:
            w.expect(name, (always, *size))

    def common(index: int) -> MLP:
        gate, up, down = shared
        both = w.derived(
            f"{gate}+{up}[{index}]", gate, up, shape=(2 * width, hidden),
            make=lambda *parts: torch.cat([floats(part)[index] for part in parts]),
        )  # fmt: skip
        return MLP(both, w.stacked(down, index), act)

    router = SinkRouter(
        b.router_weight(w, f"{prefix}.gate.weight", count + always, hidden),
        b.top_k(config, count),
        always,
        w.tensor(f"{prefix}.gate.e_score_correction_bias", (count,)),
        config.float("route_scale", low=0.0) * float(w.tensor(_factor(w, prefix), (1,))),
    )
    if not stacked:
        always_used = b.experts(w, f"{prefix}.shared_experts", always, hidden, width, act)
    else:
        always_used = [common(index) for index in range(always)]
    routed = b.experts(w, f"{prefix}.experts", count, hidden, width, act)
    return MixtureOfExperts(router, [*routed, *always_used])


def _factor(w: WeightLoader, prefix: str) -> str:
    """The name of the factor of a feed-forward part's output; experts have it in their router, but not in GGUF."""
    return b.first_present(w, f"{prefix}.gate.global_scale", f"{prefix}.global_scale")
