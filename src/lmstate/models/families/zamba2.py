"""Zamba2: Mamba-2 blocks, some of which also read a transformer block that is shared among them.

x = embed(tokens)
x = x + mamba2(norm(x))
x = x + mamba2(norm(x + link(shared([x, embed(tokens)]))))    # in hybrid layers
logits = head(norm(x))
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mamba2 import Mamba2
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.rope import make_rope
from lmstate.models.layers.zamba_hybrid import KeptEmbedding, LayerAdapter, SharedTransformer, ZambaHybrid
from lmstate.models.model import Block, Model
from lmstate.ops import Weight

DEFAULTS: b.Defaults = {"zamba2": b.EPS}

NORM_EPS = 1e-5  # of the gated norms, whatever the config says of the others


def build(w: WeightLoader) -> Model:
    config = w.config
    heads = config.int("num_attention_heads", low=1, high=b.MAX_SIZE)
    double = 2 * config.int("hidden_size", low=1, high=b.MAX_SIZE)
    shape = b.Dims.of(Config({**config, "head_dim": double // heads}, config.where))
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kinds = b.layer_kinds(config, ("layers_block_type", "layer_types"), shape.layers)
    hybrids = [index for index, kind in enumerate(kinds or ()) if kind == "hybrid"]
    if kinds is None or not {"mamba", "hybrid"} >= set(kinds):
        raise ModelError(f'{config.where} must give each layer\'s kind in "layers_block_type", "mamba" or "hybrid"')
    blocks = config.int("num_mem_blocks", low=1, high=b.MAX_SIZE, default=1)
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE, default=2 * double)
    act = b.activation(config, default="gelu")
    rank = config.int("adapter_rank", low=1, high=b.MAX_SIZE, default=128)
    rope = make_rope(config, shape.head_dim).to(w.device) if config.bool("use_mem_rope", default=False) else None
    sizes = _mamba2_shape(config, shape.hidden)

    def transformer(use: int) -> SharedTransformer:
        """The shared block of hybrid layer number `use`; files keep it in the first layer that uses the same one."""
        prefix = place = f"model.layers.{hybrids[use]}.shared_transformer"
        if not w.has(f"{prefix}.input_layernorm.weight"):
            prefix = f"model.layers.{hybrids[use % blocks]}.shared_transformer"
        seen, fed = f"{prefix}.self_attn", f"{prefix}.feed_forward"

        def linear(*names: str, shape: tuple[int | Sequence[int], int]) -> Weight:
            return w.linear(*names, shape=shape, used_as=[place + name.removeprefix(prefix) for name in names])

        def adapter(*lists: str, inputs: int, outputs: tuple[int, ...]) -> LayerAdapter:
            down = linear(*(f"{each}.0.weight" for each in lists), shape=([rank] * len(lists), inputs))
            ups = (linear(f"{each}.1.weight", shape=(size, rank)) for each, size in zip(lists, outputs))
            return LayerAdapter(down, tuple(ups))

        attention_adapter = None
        if config.bool("use_shared_attention_adapter", default=False):
            lists = [f"{seen}.linear_{part}_adapter_list.{use}" for part in "qkv"]
            attention_adapter = adapter(*lists, inputs=double, outputs=(width, kv_width, kv_width))
        return SharedTransformer(
            Attention(
                linear(*(f"{seen}.{part}_proj.weight" for part in "qkv"), shape=((width, kv_width, kv_width), double)),
                linear(f"{seen}.o_proj.weight", shape=(shape.hidden, width)),
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                (shape.head_dim / 2) ** -0.5,
                rope,
            ),
            b.norm(w, f"{prefix}.input_layernorm.weight", double, shape.eps),
            MLP(
                linear(f"{fed}.gate_up_proj.weight", shape=(2 * inner, shape.hidden)),
                linear(f"{fed}.down_proj.weight", shape=(shape.hidden, inner)),
                act,
                up_bias=b.biases(w, f"{fed}.gate_up_proj.bias"),
                down_bias=b.biases(w, f"{fed}.down_proj.bias"),
            ),
            b.norm(w, f"{prefix}.pre_ff_layernorm.weight", shape.hidden, shape.eps),
            adapter(f"{fed}.gate_up_proj_adapter_list.{use}", inputs=shape.hidden, outputs=(2 * inner,)),
            attention_adapter,
        )

    def space(prefix: str) -> Mamba2:
        gated = b.gated_norm(w, f"{prefix}.mamba.norm.weight", sizes)
        return b.mamba2(w, f"{prefix}.mamba", sizes, shape.hidden, norm=gated)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        if kinds[index] == "mamba":
            return Block(space(layer), None, b.norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps))
        link = w.linear(f"{layer}.linear.weight", shape=(shape.hidden, shape.hidden))
        before = b.norm(w, f"{layer}.mamba_decoder.input_layernorm.weight", shape.hidden, shape.eps)
        shared = transformer(hybrids.index(index))
        return Block(ZambaHybrid(shared, link, space(f"{layer}.mamba_decoder"), before), None)

    final = b.norm(w, "model.final_layernorm.weight", shape.hidden, shape.eps)
    # A file that holds the block in each layer that uses it holds all of its adapters with each.
    ignore = ("model.layers.*.shared_transformer.*adapter_list.*",)
    return b.decoder(w, shape, block, final_norm=final, ignore=ignore, entry=KeptEmbedding())


def _mamba2_shape(config: Config, hidden: int) -> b.Mamba2Shape:
    heads = config.int("n_mamba_heads", low=1, high=b.MAX_SIZE, default=8)
    return b.Mamba2Shape(
        heads,
        max(1, b.expanded(config, "mamba_expand", hidden) // heads),
        config.int("mamba_d_state", low=1, high=b.MAX_SIZE, default=64),
        config.int("mamba_ngroups", low=1, high=b.MAX_SIZE, default=1),
        config.int("mamba_d_conv", low=1, high=b.MAX_SIZE, default=4),
        NORM_EPS,
        (config.float("time_step_min", low=0.0, default=0.001), math.inf),
    )
