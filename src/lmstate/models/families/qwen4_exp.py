"""Qwen4-Exp: wide residual streams, the gated delta rule, gated attention to blocks that an index chooses, and n-grams.

s = [embed(tokens)] * N                 # N streams
s = s + ngrams(tokens, s)               # in some layers: rows of a large table
s = s + w * mixer(mix(s))               # the delta rule; in every fourth layer gated attention to chosen blocks
s = s + w' * experts(mix'(s))           # beside a gated shared one
logits = head(mix''(s))

Norms store w - 1. Mixtures are of normed streams, so that no norm comes before a part or the head.
A head for multi-token prediction (`mtp.*`; a layer past the last in GGUF) is an attention layer on as many streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.families.qwen3_next import KINDS, delta
from lmstate.models.heads.head import DraftHead
from lmstate.models.heads.wide_head import WideHead
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.hyper_connection import HyperBlock, RepeatedTokens
from lmstate.models.layers.ngrams import NgramBlock, NgramInjection, NgramTable, multipliers, primes
from lmstate.models.layers.pooled_index import PooledIndex, PooledIndexAttention
from lmstate.models.layers.rope import Rope, make_rope
from lmstate.models.model import Model
from lmstate.ops import FloatWeight, Norm, Weight

DEFAULTS: b.Defaults = {
    "qwen4_exp_text": {
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
}
MOST_TOKENS = 2**24
"""Ids that a recurrence of floats counts exactly."""


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    count = config.int("hc_count", low=2, high=64, default=4)
    rope = make_rope(config, shape.head_dim).to(w.device)
    every = config.int("full_attention_interval", low=1, default=4)
    kinds = config.strs("layer_types", shape.layers, (*KINDS, "indexed_attention"), default=None) or [
        KINDS[(index + 1) % every == 0] for index in range(shape.layers)
    ]
    acts = ("silu", "sigmoid")
    act = config.str("output_gate_type", acts, default=None) or config.str("hidden_act", acts, default="silu")
    with_ngrams = sorted(set(config.ints("ple_layer_ids", low=1, high=shape.layers, default=()) or ()))

    def mixer(index: int, layer: str) -> Mixer:
        if index < shape.layers and kinds[index] == "linear_attention":
            return delta(w, f"{layer}.linear_attn", shape, gate_act="silu" if act == "silu" else "sigmoid")
        return _attention(w, f"{layer}.self_attn", shape, rope)

    def block(index: int, layer: str = "") -> HyperBlock:
        layer = layer or f"model.layers.{index}"
        made = HyperBlock(
            mixer(index, layer),
            b.qwen_feed_forward(w, index, f"{layer}.mlp", shape, normalize=True),
            around_mixer=b.gated_streams(w, f"{layer}.attn_hyper_connection", shape, count),
            around_mlp=b.gated_streams(w, f"{layer}.mlp_hyper_connection", shape, count),
        )
        if index + 1 not in with_ngrams:
            return made
        number = with_ngrams.index(index + 1)
        return NgramBlock(**vars(made), ngrams=_ngrams(w, f"{layer}.ple", shape, count, number))

    no_norm = Norm(torch.ones(shape.hidden, dtype=torch.float32, device=w.device), shape.eps, "none")

    def head(depth: int, parts: HeadParts, embed: Weight, output: Weight) -> DraftHead:
        return WideHead(
            depth,
            (shape.layers,),
            b.norm(w, f"{parts.embed_norm}.weight", shape.hidden, shape.eps, plus_one=True),
            b.norm(w, f"{parts.hidden_norm}.weight", count * shape.hidden, shape.eps, plus_one=True),
            *_projections(w, parts.projections, shape.hidden),
            (block(shape.layers, parts.layer),),
            b.gated_streams(w, parts.mixer, shape, count, reads_only=True),
            no_norm,
            embed,
            output,
        )

    def heads(embed: Weight, output: Weight, head_bias: Tensor | None) -> tuple[DraftHead, ...]:
        return tuple(head(depth, parts, embed, output) for depth, parts in enumerate(_heads(w, shape.layers), start=1))

    return b.decoder(
        w,
        shape,
        block,
        final_norm=no_norm,
        heads=heads,
        entry=RepeatedTokens(count),
        exit=b.gated_streams(w, "model.hyper_connection_mixer", shape, count, reads_only=True),
        ignore=(
            *("*.ngram_heads_vocab_sizes", "*.ngram_heads_offsets", "*.layer_multipliers"),
            *b.mtp_tensors(config, shape),
        ),
    )


class HeadParts(NamedTuple):
    """Names of the parts of a head for multi-token prediction."""

    layer: str
    embed_norm: str
    hidden_norm: str
    projections: tuple[str, ...]  # of the embedding and of the streams, or of both side by side
    mixer: str


def _heads(w: WeightLoader, layers: int) -> Iterator[HeadParts]:
    for mtp in ("mtp", "model.mtp"):
        for layer in (f"{mtp}.layers.{index}" for index in range(b.MOST_HEADS)):
            if not w.has(f"{layer}.self_attn.q_proj.weight"):
                break
            norm = f"{mtp}.pre_fc_norm"
            both = (f"{mtp}.fc_embedding", f"{mtp}.fc_hidden")
            yield HeadParts(layer, f"{norm}_embedding", f"{norm}_hidden", both, f"{mtp}.hyper_connection_mixer")
    for layer in (f"model.layers.{layers + index}" for index in range(b.MOST_HEADS)):  # of GGUF
        if not w.has(f"{layer}.hyper_connection_mixer.hc_norm.weight"):
            break
        one = (f"{layer}.eh_proj",)
        yield HeadParts(layer, f"{layer}.enorm", f"{layer}.hnorm", one, f"{layer}.hyper_connection_mixer")


def _projections(w: WeightLoader, names: tuple[str, ...], hidden: int) -> tuple[Weight, Weight]:
    """Projections of the embedding and of each stream, `[E, E]` each, or stored as one `[E, 2 * E]`."""
    if len(names) == 2:
        embed, streams = (w.linear(f"{name}.weight", shape=(hidden, hidden)) for name in names)
        return embed, streams
    embed, streams = map(FloatWeight, w.tensor(f"{names[0]}.weight", (hidden, 2 * hidden)).chunk(2, dim=1))
    return embed, streams


def _attention(w: WeightLoader, prefix: str, shape: b.Dims, rope: Rope) -> PooledIndexAttention:
    config = w.config
    q_norm, k_norm = (
        b.norm(w, f"{prefix}.{part}_norm.weight", shape.head_dim, shape.eps, plus_one=True) for part in "qk"
    )
    heads = config.int("indexer_n_heads", low=1, high=b.MAX_SIZE)
    dim = config.int("indexer_head_dim", low=2, high=b.MAX_SIZE)
    rate = config.int("indexer_compress_ratio", low=1, high=2**16)
    budget = config.int("indexer_budget", low=1)
    turned = 2 * len(rope.frequencies)
    if budget % rate or turned > dim or config.int("indexer_kv_heads", default=1) != 1:
        raise ModelError(
            f"config: an index of blocks of {rate} tokens, a budget of {budget} tokens and keys of {dim} features, of "
            f"which {turned} rotate; the budget must be whole blocks, the keys wide enough, and of one head"
        )
    index = PooledIndex(
        _index_projection(w, f"{prefix}.indexer", heads * dim, dim, shape.hidden),
        b.norm(w, f"{prefix}.indexer.q_layernorm.weight", dim, shape.eps, plus_one=True),
        b.norm(w, f"{prefix}.indexer.k_layernorm.weight", dim, shape.eps, plus_one=True),
        rope,
        rate,
        budget // rate,
    )
    made = b.attention(w, prefix, shape, rope, q_norm=q_norm, k_norm=k_norm, gate=True)
    return PooledIndexAttention(**vars(made), index=index)


def _index_projection(w: WeightLoader, prefix: str, queries: int, keys: int, hidden: int) -> Weight:
    """Queries and keys of an index in one matrix; files of GGUF have two."""
    if w.has(f"{prefix}.index_q_proj.weight"):
        names = (f"{prefix}.index_{part}_proj.weight" for part in "qk")
        return w.linear(*names, shape=((queries, keys), hidden))
    return w.linear(f"{prefix}.index_qk_proj.weight", shape=(queries + keys, hidden))


def _ngrams(w: WeightLoader, prefix: str, shape: b.Dims, count: int, number: int) -> NgramInjection:
    """The n-grams in front of a layer, the one of this number among those with n-grams."""
    config, streams = w.config, count * shape.hidden
    order = config.int("ngram_size", low=2, high=64, default=3)
    kernel = config.int("ple_conv_kernel_size", low=1, high=64, default=4)
    table = _table(w, f"{prefix}.ple_embedding.ngram_embedding", config, shape, order, number)

    def normed(name: str) -> Tensor:
        return w.tensor(f"{prefix}.norm_{name}.weight", (streams,)).view(count, shape.hidden) + 1.0

    taps = w.tensor(f"{prefix}.conv1d.weight", (streams, 1, kernel))[:, 0]
    conv = taps.new_zeros(streams, (kernel - 1) * order + 1)
    conv[:, ::order] = taps
    return NgramInjection(
        table,
        w.linear(f"{prefix}.key_proj.weight", shape=(streams, table.width)),
        w.linear(f"{prefix}.value_proj.weight", shape=(shape.hidden, table.width)),
        b.plain_norm(w, shape.hidden, shape.eps),
        normed("key"),
        normed("query"),
        normed("conv"),
        conv,
    )


def _table(w: WeightLoader, prefix: str, config: Config, shape: b.Dims, order: int, number: int) -> NgramTable:
    """The table of a layer, in one piece or in shards."""
    heads = config.int("heads_per_ngram", low=1, high=1024, default=8) * (order - 1)
    width = config.int("ple_embed_dim", low=1, high=b.MAX_SIZE, default=shape.hidden)
    low = config.int("ngram_vocab_size_base", low=3, default=20_000_000)
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    if width % heads or not isinstance(end, int) or not 0 <= end < shape.vocab or shape.vocab > MOST_TOKENS:
        raise ModelError(
            f"config: n-grams of {shape.vocab} tokens with {heads} heads in {width} features, eos_token_id {ends}; the "
            f"features must be a multiple of the heads, the id a token's, and the tokens at most {MOST_TOKENS}"
        )
    names = [f"{prefix}.weight"]
    if not w.has(names[0]):
        shards = config.int("split_ngram_parts", low=1, high=2**16, default=512)
        names = [f"{prefix}.shard_{shard}.weight" for shard in range(shards)]
    parts = tuple(w.table(name, width // heads) for name in names)
    rows, needed = sum(map(len, parts)), low * heads  # and more; primes from a large number on would take long
    sizes = config.ints("ple_head_vocab_sizes", heads, low=1, default=None)  # GGUF has the numbers themselves
    if sizes is None and needed <= rows:
        sizes = tuple(primes(low, heads * (number + 1))[-heads:])
    needed = needed if sizes is None else sum(sizes)
    if sizes is None or rows < needed:
        raise ModelError(f"{w.source.path}: {prefix} has {rows} rows; its heads need {needed} or more")
    factors = config.ints("ple_layer_multipliers", order, low=1, high=(2**63 - 1) // shape.vocab, default=None)
    factors = factors or multipliers(shape.vocab, order, number, config.int("seed", default=1234))
    return NgramTable(parts, factors, torch.tensor(sizes, device=w.device), end)
