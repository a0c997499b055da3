"""GLM-5.3: wide residual streams, a delta rule with a decay a channel, latent attention to chosen blocks, and experts.

s = [embed(tokens)] * N                       # N streams
s = mixed(s) + w * mixer(norm(mix(s)))        # the delta rule; in every fourth layer latent attention
s = mixed(s) + w' * experts(norm(mix'(s)))    # the first layers: an MLP
logits = head(norm(mean(s)))

Attention knows no positions. Layers may share the choice of blocks of an earlier one. A head for multi-token prediction
is a layer past the last, of one stream.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.renamed import Renamed
from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.families import builders as b
from lmstate.models.families.deepseek import LATENT_EPS, choosing_layers, latent_attention
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.compressed_attention import Compressor
from lmstate.models.layers.hyper_connection import HyperBlock, MeanOfStreams, RepeatedEmbedding
from lmstate.models.layers.mlp import MLP, ClampedMLP, FeedForward
from lmstate.models.layers.pooled_index import PooledPositionIndex
from lmstate.models.layers.position_index import EarlierChoice
from lmstate.models.model import Model
from lmstate.ops import Norm

DEFAULTS: b.Defaults = {
    "glm5_next_text": {
        **b.EPS,
        "vocab_size": 154_880,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "n_routed_experts": 288,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "v_head_dim": 256,
        "first_k_dense_replace": 3,
    }
}
KINDS = ("linear_attention", "full_attention", "indexed_attention")  # the last two are the same
FLOOR = -5.0
HYPER = re.compile(r"\.hc_(attn|ffn)_(fn|base|scale)$")


def build(w: WeightLoader) -> Model:
    names = [(HYPER.sub(r".\1_hc.\2", name), name) for name in w.source.names()]
    config = Config({**w.config, "head_dim": None}, w.config.where)  # it is of a rope, which these models have not
    w = w.over(Renamed(w.source, names, w.source.config))
    w.config = config
    if config.int("qk_rope_head_dim", default=0) or not config.bool("index_kpool_always_select_tail", default=True):
        raise ModelError(
            f"{w.source.path}: lmstate runs glm5_next models without rope, whose last tokens are always attended to; "
            "qk_rope_head_dim must be 0, and index_kpool_always_select_tail true"
        )
    shape, linear = b.Dims.of(config), config.fields("linear_attn_config") or Config({})
    kinds = config.strs("layer_types", shape.layers, KINDS, default=None) or [
        KINDS[index % 4 == 3] for index in range(shape.layers)
    ]
    reads = _choice_sources([kind != KINDS[0] for kind in kinds], choosing_layers(config, shape.layers))
    heads, dim, kernel = (
        linear.int(older, low=1, high=high, default=config.int(name, low=1, high=high, default=default))
        for name, older, default, high in (
            ("linear_num_heads", "num_heads", 64, b.MAX_SIZE),
            ("linear_head_dim", "head_dim", 128, b.MAX_SIZE),
            ("linear_conv_kernel_dim", "short_conv_kernel_size", 4, 256),
        )
    )
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    limit = config.float("swiglu_limit", low=1e-6, default=10.0)
    floor, scale = _floor(config), config.int("qk_nope_head_dim", low=1, high=b.MAX_SIZE) ** -0.5
    normed, sparse = b.rms_norms(w, shape), b.sparse_layers(config, shape.layers)
    streams = b.Streams(
        config.int("hc_mult", low=1, high=64, default=4),
        config.float("hc_eps", low=0.0, default=1e-6),
        balancings=config.int("hc_sinkhorn_iters", low=1, high=1000, default=20),
    )
    indexes: dict[int, PooledPositionIndex] = {}

    def mixer(index: int, prefix: str) -> Mixer:
        if kinds[index] == KINDS[0]:
            return b.channel_delta(w, prefix, shape, heads, dim, kernel, floor=floor)
        made = latent_attention(w, prefix, shape, None, 0, scale, eps=shape.eps)
        if (source := reads[index]) is not None:
            return replace(made, index=EarlierChoice(indexes[source].name, indexes[source].budget))
        indexes[index] = _index(w, f"{prefix}.indexer", shape)
        return replace(made, index=indexes[index])

    def clamped(part: FeedForward) -> FeedForward:
        assert isinstance(part, MLP)
        return ClampedMLP(part, limit)

    def feed_forward(prefix: str, is_sparse: bool) -> FeedForward:
        if not is_sparse:
            return clamped(b.mlp(w, prefix, shape.hidden, inner, act))
        mixture = b.deepseek_mixture(w, prefix, shape)
        shared = None if mixture.shared is None else clamped(mixture.shared)
        return replace(mixture, experts=[clamped(expert) for expert in mixture.experts], shared=shared)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return HyperBlock(
            mixer(index, f"{layer}.self_attn"),
            feed_forward(f"{layer}.mlp", sparse[index]),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            around_mixer=b.hyper_connection(w, f"{layer}.attn_hc", shape, streams),
            around_mlp=b.hyper_connection(w, f"{layer}.ffn_hc", shape, streams),
        )

    def head_block(layer: str) -> Block:
        """Block of a prediction head, on one stream."""
        attention = latent_attention(w, f"{layer}.self_attn", shape, None, 0, scale, eps=shape.eps)
        return Block(
            replace(attention, index=_index(w, f"{layer}.self_attn.indexer", shape)),
            feed_forward(f"{layer}.mlp", w.has(f"{layer}.mlp.gate.weight")),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
        )

    head_names = b.layers_past_the_last(w, shape.layers)
    return b.decoder(
        w,
        shape,
        block,
        heads=b.prediction_heads(w, shape, normed, head_names, head_block),
        entry=RepeatedEmbedding(streams.count),
        exit=MeanOfStreams(streams.count),
        reads=reads,
        ignore=b.mtp_tensors(config, shape),
    )


def _choice_sources(attends: Sequence[bool], chooses: Sequence[bool]) -> list[int | None]:
    """For each layer the earlier one by whose choice it attends, if it does not choose for itself."""
    sources: list[int | None] = []
    for index, (attending, choosing) in enumerate(zip(attends, chooses)):
        earlier = [at for at in range(index) if attends[at] and chooses[at]]
        if attending and not choosing and not earlier:
            raise ModelError(f"config: layer {index} attends by the choice of an earlier layer, and none chooses")
        sources.append(earlier[-1] if attending and not choosing else None)
    return sources


def _floor(config: Config) -> float | None:
    """The least log decay; None where it has none."""
    floor = config.float("linear_lower_bound", high=0.0, default=None) if "linear_lower_bound" in config else FLOOR
    if (older := config.fields("linear_attn_config")) is None:
        return floor
    floor = older.float("gate_lower_bound", high=0.0, default=floor)
    return FLOOR if floor is None and older.bool("safe_gate", default=True) else floor


def _index(w: WeightLoader, prefix: str, shape: b.Dims) -> PooledPositionIndex:
    config = w.config
    heads = config.int("index_n_heads", low=1, high=b.MAX_SIZE, default=32)
    dim = config.int("index_head_dim", low=1, high=b.MAX_SIZE, default=128)
    rate = config.int("index_kpool", low=1, high=2**16, default=16)
    budget = config.int("index_topk", low=1, default=2048)
    if budget % rate:
        raise ModelError(f"config: index_topk is {budget}; expected a multiple of index_kpool, which is {rate}")
    latent = config.int("q_lora_rank", low=1, high=b.MAX_SIZE)
    return PooledPositionIndex(
        w.linear(f"{prefix}.wk.weight", f"{prefix}.index_kpool_compress_gate", shape=((dim, dim), shape.hidden)),
        Norm(
            w.tensor(f"{prefix}.k_norm.weight", (dim,)), LATENT_EPS, "layer", w.tensor(f"{prefix}.k_norm.bias", (dim,))
        ),
        Compressor(rate, None, w.tensor(f"{prefix}.index_kpool_compress_ape", (rate, dim)), None),
        w.linear(f"{prefix}.wq_b.weight", shape=(heads * dim, latent)),
        b.router_weight(w, f"{prefix}.weights_proj.weight", heads, shape.hidden),
        budget // rate,
    )
