"""Zamba (2405.16712): Mamba blocks of several heads, some of which also read a transformer block that they share.

x = embed(tokens)
x = x + mamba(norm(x))
x = x + mamba(norm(x + link(shared([x, embed(tokens)]))))    # in hybrid layers
logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.source import floats
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mamba import HeadedMamba
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.zamba_hybrid import KeptEmbedding, SharedTransformer, ZambaHybrid
from lmstate.models.model import Block, Model
from lmstate.ops import Weight

DEFAULTS: b.Defaults = {"zamba": {**b.EPS, "hidden_act": "gelu", "tie_word_embeddings": True}}


def build(w: WeightLoader) -> Model:
    config = w.config
    hidden, heads = (config.int(name, low=1, high=b.MAX_SIZE) for name in ("hidden_size", "num_attention_heads"))
    double = config.int("attention_hidden_size", low=1, high=b.MAX_SIZE, default=0) or 2 * hidden
    if double != 2 * hidden:
        raise ModelError(f"{config.where}: attention reads stream and embedding, {2 * hidden} wide, not {double}")
    head_dim = config.int("attention_head_dim", low=1, high=b.MAX_SIZE, default=0) or max(1, double // heads)
    shape = b.Dims.of(Config({**config, "head_dim": head_dim}, config.where))
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    kinds = _kinds(config, shape.layers)
    sizes = b.MambaShape(
        b.expanded(config, "mamba_expand", shape.hidden),
        config.int("mamba_d_state", low=1, high=b.MAX_SIZE, default=16),
        b.dt_rank(config, "mamba_dt_rank", shape.hidden),
        config.int("mamba_d_conv", low=1, high=b.MAX_SIZE, default=4),
    )
    b.only_silu(config, "hidden_mamba_act")

    def transformer(place: str) -> SharedTransformer:
        """The shared block as the layer `place` uses it; files may keep it in the first hybrid layer alone."""
        prefix = f"{place}.shared_transf"
        if not w.has(f"{prefix}.input_layernorm.weight"):
            prefix = f"model.layers.{kinds.index('hybrid')}.shared_transf"

        def linear(*names: str, shape: tuple[int | Sequence[int], int]) -> Weight:
            used_as = [f"{place}.shared_transf.{name}.weight" for name in names]
            return w.linear(*(f"{prefix}.{name}.weight" for name in names), shape=shape, used_as=used_as)

        qkv = (f"self_attn.{part}_proj" for part in "qkv")
        gate, up, down = (f"feed_forward.{part}_proj" for part in ("gate", "up", "down"))
        return SharedTransformer(
            Attention(
                linear(*qkv, shape=((width, kv_width, kv_width), double)),
                linear("self_attn.o_proj", shape=(shape.hidden, width)),
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                (shape.head_dim / 2) ** -0.5,
            ),
            b.norm(w, f"{prefix}.input_layernorm.weight", double, shape.eps),
            MLP(
                linear(gate, up, shape=((inner, inner), shape.hidden)),
                linear(down, shape=(shape.hidden, inner)),
                act,
            ),
            b.norm(w, f"{prefix}.pre_ff_layernorm.weight", shape.hidden, shape.eps),
        )

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        place = layer if kinds[index] == "mamba" else f"{layer}.mamba_decoder"
        space = _mamba(w, f"{place}.mamba", sizes, shape.hidden)
        before = b.norm(w, f"{place}.input_layernorm.weight", shape.hidden, shape.eps)
        if kinds[index] == "mamba":
            return Block(space, None, before)
        link = w.linear(f"{layer}.linear.weight", shape=(shape.hidden, shape.hidden))
        return Block(ZambaHybrid(transformer(layer), link, space, before), None)

    final = b.norm(w, "model.final_layernorm.weight", shape.hidden, shape.eps)
    return b.decoder(w, shape, block, final_norm=final, entry=KeptEmbedding())


def _kinds(config: Config, layers: int) -> tuple[str, ...]:
    kinds = b.layer_kinds(config, ("layers_block_type", "layer_types"), layers)
    if kinds is None:
        every = config.int("attn_layer_period", low=1, default=6)
        first = config.int("attn_layer_offset", low=0, default=4)
        rest = ("hybrid" if index % every == first else "mamba" for index in range(layers - 3))
        return ("mamba", "mamba", "hybrid", *rest)[:layers]
    if not {"mamba", "hybrid"} >= set(kinds):
        raise ModelError(f'{config.where}: "layers_block_type" must name the kinds "mamba" and "hybrid" alone')
    return kinds


def _mamba(w: WeightLoader, prefix: str, sizes: b.MambaShape, hidden: int) -> HeadedMamba:
    """A mixer whose `in_proj` gives each feature and its gate side by side, and which holds matrices for each head."""
    heads = w.config.int("n_mamba_heads", low=1, high=b.MAX_SIZE, default=2)
    inner, size = sizes.inner, sizes.state_size
    if inner % heads:
        raise ModelError(f"{w.config.where}: {heads} Mamba heads cannot share {inner} features evenly")
    width, chosen = inner // heads, sizes.rank + 2 * size

    def order() -> torch.Tensor:
        return torch.arange(2 * inner).view(-1, 2).T.flatten()

    def stacked(name: str, height: int, depth: int) -> Weight:
        """The matrices of all heads, one below the other."""
        w.expect(name, (heads, height, depth))
        return w.derived(name, name, make=lambda each: floats(each).flatten(0, 1), shape=(heads * height, depth))

    bias = b.biases(w, f"{prefix}.in_proj.bias")
    return HeadedMamba(
        w.linear(f"{prefix}.in_proj.weight", shape=(2 * inner, hidden), order=order),
        stacked(f"{prefix}.x_proj_weight", chosen, width),
        stacked(f"{prefix}.dt_proj_weight", width, sizes.rank),
        w.linear(f"{prefix}.out_proj.weight", shape=(hidden, inner)),
        b.convolution(w, f"{prefix}.conv1d.weight", inner, sizes.kernel),
        b.biases(w, f"{prefix}.conv1d.bias", wanted=w.config.bool("mamba_conv_bias", default=True)),
        w.tensor(f"{prefix}.dt_proj_bias", (heads, width)).flatten(),
        -w.tensor(f"{prefix}.A_log", (heads, width, size)).exp().flatten(0, 1),
        w.tensor(f"{prefix}.D", (heads, width)).flatten(),
        bias=None if bias is None else bias[order().to(bias.device)],
        out_bias=b.biases(w, f"{prefix}.out_proj.bias"),
        heads=heads,
    )
