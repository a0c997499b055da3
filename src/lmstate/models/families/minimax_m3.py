"""MiniMax-M3: attention to blocks of positions that an index chooses, and experts beside one that is always used.

x = embed(tokens)
x = x + attention(norm(x))
x = x + scale * sum over chosen e: g_e * expert_e(y) + shared(y)   # y = norm(x); some layers are dense
logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.block_index import BlockAttention, BlockIndex
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import Rope, make_rope
from lmstate.models.model import Model
from lmstate.state import BlockChoice

DEFAULTS: b.Defaults = {
    "minimax_m3_vl_text": {
        "vocab_size": 200_064,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "dense_intermediate_size": 12_288,
        "shared_intermediate_size": 3072,
        "routed_scaling_factor": 2.0,
    }
}
FULL, SPARSE = "full_attention", "minimax_m3_sparse"
# Fields of the index, and their names in `sparse_attention_config`.
INDEX = {
    "index_n_heads": ("sparse_num_index_heads", 4),
    "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
    "index_local_blocks": ("sparse_local_block", 1),
}
SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Settings of the gate, which its operation has built in."""


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, count = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.expert_count(config)
    dense = config.int("dense_intermediate_size", low=1, high=b.MAX_SIZE)
    common = config.int("shared_intermediate_size", low=1, high=b.MAX_SIZE)
    for name, known in SWIGLU.items():
        if (given := config.float(name, default=known)) != known:
            raise ModelError(f"config: {name} is {given}; lmstate runs MiniMax-M3 with {known} alone")
    rope = make_rope(config, shape.head_dim, theta=5e6).to(w.device)
    sizes = _index_sizes(config, shape)
    kinds = (*_kinds(config, shape.layers), SPARSE)  # the last is that of prediction heads
    sparse = [*_sparse(config, shape.layers), True]
    normed = b.rms_norms(w, shape, plus_one=True)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = (
            b.norm(w, f"{prefix}.{part}_norm.weight", shape.head_dim, shape.eps, plus_one=True) for part in "qk"
        )
        made = b.attention(w, prefix, shape, rope, q_norm=q_norm, k_norm=k_norm)
        if kinds[index] == FULL:
            return made
        return BlockAttention(**vars(made), index=_index(w, prefix, shape, sizes, rope))

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not sparse[index]:
            return _mlp(w, prefix, shape.hidden, dense)
        inside = prefix
        if not w.has(f"{prefix}.gate.weight"):  # as published
            inside = f"{prefix.removesuffix('mlp')}block_sparse_moe"
        correction = b.first_present(
            w, f"{inside}.gate.e_score_correction_bias", f"{inside}.e_score_correction_bias"
        )  # fmt: skip
        router = Router(
            b.router_weight(w, f"{inside}.gate.weight", count, shape.hidden),
            b.top_k(config, count),
            "sigmoid",
            normalize=True,
            scale=config.float("routed_scaling_factor"),
            e_score_correction_bias=w.tensor(correction, (count,)),
            floor=0.0,
        )
        each = b.experts(w, f"{inside}.experts", count, shape.hidden, inner, "swigluoai")
        return MixtureOfExperts(router, each, _mlp(w, f"{inside}.shared_experts", shape.hidden, common))

    block = b.pre_norm(normed, mixer, feed_forward)
    heads = b.prediction_heads(w, shape, normed, _head_names(w), partial(block, shape.layers))
    return b.decoder(
        w, shape, block, final_norm=normed("model.norm"), heads=heads, ignore=("mtp.*", "model.mtp.*")
    )  # fmt: skip


def _head_names(w: WeightLoader) -> Iterator[b.HeadNames]:
    """Names of heads for multi-token prediction."""
    for start in ("model.mtp.layers", "mtp.layers"):
        for layer in (f"{start}.{index}" for index in range(b.MOST_HEADS)):
            if not w.has(f"{layer}.eh_proj.weight"):
                break
            names = (f"{layer}.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm"))
            yield b.HeadNames(f"{layer}.transformer_layer", *names)


def _mlp(w: WeightLoader, prefix: str, hidden: int, inner: int) -> FeedForward:
    if w.has(f"{prefix}.gate_up_proj.weight"):
        return b.fused_mlp(w, prefix, hidden, inner, "swigluoai")
    names = b.W1_W3_W2 if w.has(f"{prefix}.w1.weight") else b.GATE_UP_DOWN
    return b.mlp(w, prefix, hidden, inner, "swigluoai", names)


def _index(w: WeightLoader, prefix: str, shape: b.Dims, sizes: dict[str, int], rope: Rope) -> BlockIndex:
    heads, dim = sizes["index_n_heads"], sizes["index_head_dim"]
    inside = f"{prefix}.indexer." if w.has(f"{prefix}.indexer.q_proj.weight") else f"{prefix}.index_"
    q_norm, k_norm = (b.norm(w, f"{inside}{part}_norm.weight", dim, shape.eps, plus_one=True) for part in "qk")
    return BlockIndex(
        w.linear(f"{inside}q_proj.weight", shape=(heads * dim, shape.hidden)),
        w.linear(f"{inside}k_proj.weight", shape=(dim, shape.hidden)),
        q_norm,
        k_norm,
        rope,
        BlockChoice(sizes["index_topk_blocks"], sizes["index_block_size"], sizes["index_local_blocks"]),
    )


def _index_sizes(config: Config, shape: b.Dims) -> dict[str, int]:
    """Sizes of the index, under the names of this config or of older ones."""
    older = config.fields("sparse_attention_config") or Config({})
    sizes = {}
    for name, (alias, default) in INDEX.items():
        low = 0 if name == "index_local_blocks" else 1
        given = older.int(alias, low=low, high=b.MAX_SIZE, default=None)
        sizes[name] = config.int(name, low=low, high=b.MAX_SIZE, default=default) if given is None else given
    heads = sizes["index_n_heads"]
    if shape.heads % heads or heads % shape.kv_heads:
        raise ModelError(
            f"config: an index of {heads} heads was asked for; {shape.heads} query heads over {shape.kv_heads} "
            "key/value heads need one choice for each of these, or several"
        )
    return sizes


def _kinds(config: Config, layers: int) -> tuple[str, ...]:
    kinds = config.strs("layer_types", layers, allowed=(FULL, SPARSE), default=None)
    if kinds is not None:
        return kinds
    older = config.fields("sparse_attention_config") or Config({})
    chooses = older.ints("sparse_attention_freq", layers, high=1, default=None)
    return (FULL,) * layers if chooses is None else tuple(SPARSE if each else FULL for each in chooses)


def _sparse(config: Config, layers: int) -> list[bool]:
    """Whether each layer has experts."""
    kinds = config.strs("mlp_layer_types", layers, allowed=("dense", "sparse"), default=None)
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    return [each == 1 for each in config.ints("moe_layer_freq", layers, high=1, default=None) or [1] * layers]
