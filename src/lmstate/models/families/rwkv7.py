"""RWKV-7 (Peng et al. 2025, 2503.14456), under the names of flash-linear-attention's checkpoints.

x = norm(embed(tokens))
x = x + out(g * (norm(delta(r, w, k, v, a)) + own))  # r, w, k, v, a, g: of norm(x) and of the token before
x = x + value(relu(key(...)) ** 2)                   # of norm(x) and of the token before
logits = head(norm(x))

v of later layers is mixed with v of the first one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.embedding import NormedEmbedding
from lmstate.models.layers.rwkv7 import Act, LowRankMap, SquaredMix, StreamAlone, VectorDelta, VectorDeltaLayer
from lmstate.models.model import Block, Model
from lmstate.ops import FloatWeight, Norm, Weight

# Those of flash-linear-attention's RWKV7Config.
DEFAULTS: b.Defaults = {
    "rwkv7": {"vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 24, "hidden_act": "sqrelu"}
}

SMALLEST = 1e-24  # square of the least length by which a vector is divided


def build(w: WeightLoader) -> Model:
    config = w.config
    hidden = config.int("hidden_size", low=1, high=b.MAX_SIZE)
    shape = b.Dims(
        hidden,
        config.int("num_hidden_layers", low=1, high=4096),
        0,
        0,
        0,
        config.int("vocab_size", low=1, high=2**24),
        config.float("norm_eps", low=0.0, high=1.0, default=1e-5),
    )
    heads = config.int("num_heads", low=1, high=hidden, default=None)
    dim = config.int("head_dim", low=1, high=hidden, default=None) or (hidden // heads if heads else 64)
    if hidden % dim or (heads or hidden // dim) * dim != hidden:
        raise ModelError(f"{config.where}: heads of {dim} features cannot share a width of {hidden}")
    ratio = config.float("hidden_ratio", low=1e-3, high=1e3, default=4.0)
    default = (int(hidden * ratio) + 31) // 32 * 32
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE, default=None) or default
    config.str("hidden_act", ("sqrelu",))
    for name, least in (("norm_first", True), ("norm_bias", True)):
        if config.bool(name, default=True) is not least:
            raise ModelError(f"{config.where} has {name}: false, which lmstate cannot run")
    if config.get("attn"):
        raise ModelError(f"{config.where} has layers of attention ('attn'), which lmstate cannot run in RWKV-7")
    values = config.get("value_dim")
    if values is not None and any(width != hidden for width in (values if isinstance(values, list) else [values])):
        raise ModelError(f"{config.where} has value_dim {values}; lmstate runs RWKV-7 with values of {hidden} features")

    def layer_norm(name: str) -> Norm:
        return Norm(w.tensor(f"{name}.weight", (hidden,)), shape.eps, "layer", w.tensor(f"{name}.bias", (hidden,)))

    def matrix(name: str, outputs: int = hidden, inputs: int = hidden) -> Weight:
        return w.linear(f"{name}.weight", shape=(outputs, inputs))

    def low_rank(name: str, act: Act | None = None, biased: bool = True) -> LowRankMap:
        down, up = f"{name}.lora.0", f"{name}.lora.2"
        rank = next(iter(w.shape(f"{down}.weight")), 0)
        bias = w.tensor(f"{up}.bias", (hidden,)) if biased else None
        narrow = FloatWeight(w.tensor(f"{down}.weight", (rank, hidden)))  # float32, for errors of decays would last
        return LowRankMap(narrow, FloatWeight(w.tensor(f"{up}.weight", (hidden, rank))), bias, act)

    def vector(name: str, *shape: int) -> Tensor:
        """A parameter that is stored with axes of one feature, or flat."""
        stored = w.shape(name)
        fits = torch.Size(stored).numel() == torch.Size(shape).numel()
        return w.tensor(name, stored if fits else shape).reshape(shape)

    unit = Norm(torch.full((dim,), dim**-0.5), SMALLEST / dim)

    def mixer(index: int, name: str) -> VectorDelta:
        parts = [f"{name}.x_{part}" for part in "rwkvag"]
        shares = (
            vector(f"{name}.x_x", 6, hidden)
            if w.has(f"{name}.x_x")
            else torch.stack([vector(part, hidden) for part in parts])
        )
        return VectorDelta(
            shares,
            matrix(f"{name}.r_proj"),
            matrix(f"{name}.k_proj"),
            matrix(f"{name}.v_proj"),
            low_rank(f"{name}.w_lora", "tanh"),
            low_rank(f"{name}.a_lora"),
            low_rank(f"{name}.g_lora", "sigmoid", biased=False),
            low_rank(f"{name}.v_lora") if index else None,
            vector(f"{name}.k_k", hidden),
            vector(f"{name}.k_a", hidden),
            vector(f"{name}.r_k", hidden // dim, dim),
            unit,
            Norm(
                vector(f"{name}.g_norm.weight", hidden // dim, dim),
                dim * shape.eps,
                "layer",
                vector(f"{name}.g_norm.bias", hidden // dim, dim),
            ),
            matrix(f"{name}.o_proj"),
        )

    def block(index: int) -> Block:
        name = f"model.layers.{index}"
        feed = SquaredMix(
            matrix(f"{name}.ffn.key", inner),
            matrix(f"{name}.ffn.value", hidden, inner),
            vector(f"{name}.ffn.x_k", hidden),
        )
        norms = layer_norm(f"{name}.attn_norm"), layer_norm(f"{name}.ffn_norm")
        return Block(VectorDeltaLayer(mixer(index, f"{name}.attn"), norms[0], feed, norms[1]), None)

    return b.decoder(
        w,
        shape,
        block,
        embed="model.embeddings",
        entry=NormedEmbedding(layer_norm("model.layers.0.pre_norm")),
        exit=StreamAlone(hidden),
        final_norm=layer_norm("model.norm"),
        ignore=("model.layers.0.attn.v_lora.*",),  # of converters that write all layers alike
    )
