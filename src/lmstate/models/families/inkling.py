"""Inkling (Thinking Machines): attention by content and distance, and short convolutions after every part.

x = norm(embed(tokens))
x = x + conv(attention(norm(x)))                            # keys and values convolved; a score by distance
x = x + conv(sum over chosen e: g_e * expert_e(norm(x)))    # some experts always; or an MLP
logits = scale * head(norm(x))

A convolution adds its input to what it gives. Layers with a window have other sizes. Published files have names of
their own, and the rows of gates and of what they gate by turns.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import Numbers, WeightLoader
from lmstate.checkpoints.renamed import Renamed
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
from lmstate.ops import FloatWeight, Weight

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
NAMES = {"sconv_kernel_size": "conv_kernel_size", "model_max_length": b.POSITIONS}
# Parts of names in published files -> those in memory.
PUBLISHED = {
    r"\.attn\.": ".self_attn.",
    r"\.w([qkvr])_d[uv]\.": r".\1_proj.",
    r"\.wo_ud\.": ".o_proj.",
    r"_sconv\.weight$": "_sconv.conv1d.weight",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.mlp_norm\.": ".post_attention_layernorm.",
    r"^model\.embed_norm\.": "model.embed_tokens.embed_norm.",
    r"\.mlp\.gate\.bias$": ".mlp.gate.e_score_correction_bias",
    r"\.mlp\.w2_md\.": ".mlp.down_proj.",
    r"\.experts\.w2_weight$": ".experts.down_proj",
    r"\.shared_experts\.shared_w2_weight$": ".shared_experts.down_proj",
}


def build(w: WeightLoader) -> Model:
    w = w.over(Renamed(w.source, [(_plain(name), name) for name in w.source.names()], w.source.config))
    w.config = config = b.with_usual_names(b.completed(w.config, DEFAULTS["inkling_text"]), NAMES)
    shape, kinds = b.Dims.of(config), layer_kinds(config)
    mixtures = config.strs("mlp_layer_types", shape.layers, ("dense", "sparse"), default=None) or [
        "dense" if index < config.int("dense_mlp_idx", low=0, default=0) else "sparse" for index in range(shape.layers)
    ]
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    width = b.expert_width(config)
    if config.given("dense_intermediate_size"):  # then the other one is that of the experts
        inner, width = config.int("dense_intermediate_size", low=1, high=b.MAX_SIZE), inner
    normed = b.rms_norms(w, shape)

    def mlp(prefix: str) -> MLP:
        if not w.has(f"{prefix}.w13_dn.weight"):
            return b.mlp(w, prefix, shape.hidden, inner, act, biased=False)
        both = w.linear(
            f"{prefix}.w13_dn.weight", shape=(2 * inner, shape.hidden), order=lambda: _parted(torch.arange(2 * inner))
        )
        return MLP(both, w.linear(f"{prefix}.down_proj.weight", shape=(shape.hidden, inner)), act)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        sparse = mixtures[index] == "sparse"
        fed = taps(w, f"{layer}.mlp_sconv", shape.hidden)
        if not sparse:  # the factor of an MLP's output
            fed = fed * w.tensor(f"{layer}.mlp.global_scale", (1,))
        made = ConvolvedLayer(
            _attention(w, f"{layer}.self_attn", shape, kinds[index] == SLIDING),
            ShortTaps(taps(w, f"{layer}.attn_sconv", shape.hidden)),
            _mixture(w, f"{layer}.mlp", shape, width, act) if sparse else mlp(f"{layer}.mlp"),
            normed(f"{layer}.post_attention_layernorm"),
            ShortTaps(fed),
        )
        return Block(made, None, normed(f"{layer}.input_layernorm"))

    answered = config.int("unpadded_vocab_size", low=1, high=shape.vocab, default=shape.vocab)
    head = None
    if w.has("lm_head.weight") and w.shape("lm_head.weight")[:1] != (answered,):  # rows of no token
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


def layer_kinds(config: Config) -> list[str]:
    layers = config.int("num_hidden_layers", low=1, high=4096)
    given = config.strs("layer_types", layers, (FULL, SLIDING), default=None)
    if given is not None:
        return list(given)
    slides = config.ints("local_layer_ids", default=tuple(index for index in range(layers) if (index + 1) % 6))
    return [SLIDING if index in slides else FULL for index in range(layers)]


def taps(w: WeightLoader, name: str, width: int) -> Tensor:
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
        ShortTaps(torch.cat([taps(w, f"{prefix}.{part}_sconv", kv_width) for part in "kv"])),
        window,
        None if slides or floor is None else LogTemperature(floor, config.float("log_scaling_alpha", default=0.1)),
    )


def _mixture(w: WeightLoader, prefix: str, shape: b.Dims, width: int, act: str) -> MixtureOfExperts:
    config, count = w.config, b.expert_count(w.config)
    always, hidden = config.int("n_shared_experts", low=1, high=b.MAX_SIZE), shape.hidden
    router = SinkRouter(
        b.router_weight(w, f"{prefix}.gate.weight", count + always, hidden),
        b.top_k(config, count),
        always,
        w.tensor(f"{prefix}.gate.e_score_correction_bias", (count,)),
        config.float("route_scale", low=0.0) * b.number(w.tensor(_factor(w, prefix), (1,))),
    )
    routed = experts(w, f"{prefix}.experts", "w13_weight", count, hidden, width, act)
    common = experts(w, f"{prefix}.shared_experts", "shared_w13_weight", always, hidden, width, act)
    return MixtureOfExperts(router, [*routed, *common])


def experts(
    w: WeightLoader, prefix: str, published: str, count: int, hidden: int, width: int, act: str
) -> list[MLP]:  # fmt: skip
    """Experts of one kind. `published`: what files call the gates and what they gate, by turns, of all of them."""
    by_turns, gate, up = (f"{prefix}.{name}" for name in (published, "gate_proj", "up_proj"))
    if not w.has(by_turns) and not w.has(gate):
        return b.experts(w, prefix, count, hidden, width, act)
    tensors = [by_turns] if w.has(by_turns) else [gate, up]
    for name in tensors:
        w.expect(name, (count, 2 * width // len(tensors), hidden))

    def both(index: int) -> Weight:
        def made(*parts: Numbers) -> Tensor:
            rows = torch.cat([floats(part) for part in parts])
            return rows if len(parts) > 1 else _parted(rows)

        return w.derived(f"{'+'.join(tensors)}[{index}]", *tensors, make=made, shape=(2 * width, hidden), of=index)

    down = f"{prefix}.down_proj"
    return [MLP(both(index), w.stacked(down, index, (count, hidden, width)), act) for index in range(count)]


def _parted(rows: Tensor) -> Tensor:
    """Rows that are by turns as gates first, then what they gate."""
    return torch.cat([rows[0::2], rows[1::2]])


def _plain(name: str) -> str:
    """The name in memory of a tensor."""
    for published, own in PUBLISHED.items():
        name = re.sub(published, own, name)
    return name


def _factor(w: WeightLoader, prefix: str) -> str:
    """The name of the factor of a feed-forward part's output; experts have it in their router, but not in GGUF."""
    return b.first_present(w, f"{prefix}.gate.global_scale", f"{prefix}.global_scale")
