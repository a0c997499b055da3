"""xLSTM-7B (Beck et al. 2025, 2503.13427): a matrix memory in every layer, and a gated feed-forward part.

x = embed(tokens)
x = x + mlstm(norm(x))
x = x + mlp(norm(x))
logits = softcap(head(norm(x)))
"""

from __future__ import annotations

import torch

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.mlstm import MLSTM
from lmstate.models.model import Block, Model
from lmstate.ops import FloatWeight, Norm

DEFAULTS: b.Defaults = {
    "xlstm": {
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "gate_soft_cap": 15.0,
        "output_logit_soft_cap": 30.0,
    }
}

MOST_CAP = 40.0  # exp of it, and a long sum of such, is a float32 number


def build(w: WeightLoader) -> Model:
    config = w.config
    hidden = config.int("hidden_size", low=1, high=b.MAX_SIZE, default=None) or config.int(
        "embedding_dim", low=1, high=b.MAX_SIZE
    )
    if config.int("embedding_dim", default=hidden) != hidden:
        raise ModelError(
            f"{config.where}: embedding_dim is {config['embedding_dim']}, and hidden_size {hidden}; they must be one "
            "number"
        )
    layers = config.int("num_blocks", low=1, high=4096, default=None) or config.int("num_hidden_layers", 1, 4096)
    vocab = config.int("vocab_size", low=1, high=2**24)
    shape = b.Dims(hidden, layers, 0, 0, 0, vocab, config.float("norm_eps", low=0.0, high=1.0, default=1e-6))
    biased = config.bool("use_bias", default=False)
    inner = _inner(config, hidden)

    def layer_norm(name: str) -> Norm:
        bias = w.tensor(f"{name}.bias", (hidden,)) if biased else None
        return Norm(w.tensor(f"{name}.weight", (hidden,)), shape.eps, bias=bias)

    def block(index: int) -> Block:
        layer = f"backbone.blocks.{index}"
        return Block(
            mlstm(w, f"{layer}.mlstm_layer", shape, biased),
            feed_forward(w, f"{layer}.ffn", hidden, inner),
            layer_norm(f"{layer}.norm_mlstm"),
            layer_norm(f"{layer}.norm_ffn"),
        )

    return b.decoder(
        w,
        shape,
        block,
        embed="backbone.embeddings",
        final_norm=Norm(w.tensor("backbone.out_norm.weight", (hidden,)), shape.eps),
        logit_softcap=config.float("output_logit_soft_cap", low=1e-3, high=1e6, default=None),
    )


def _inner(config: Config, hidden: int) -> int:
    """The width inside the feed-forward parts, a multiple of a number."""
    multiple = config.int("ffn_round_up_to_multiple_of", low=1, high=b.MAX_SIZE, default=64)
    width = hidden * config.float("ffn_proj_factor", low=1e-3, high=1e3, default=2.667)
    return int((width + multiple - 1) // multiple * multiple)


def mlstm(w: WeightLoader, prefix: str, shape: b.Dims, biased: bool) -> MLSTM:
    config, hidden = w.config, shape.hidden
    heads = config.int("num_heads", low=1, high=b.MAX_SIZE, default=8)
    keys, values = (
        int(hidden * config.float(f"{part}_dim_factor", low=1e-3, high=1e3, default=default))
        for part, default in (("qk", 0.5), ("v", 1.0))
    )
    if keys % heads or values % heads or not keys or not values:
        raise ModelError(f"{config.where}: {heads} heads cannot share {keys} features of keys and {values} of values")
    if w.has(f"{prefix}.qkv_opreact.weight"):  # stored as one, as here
        names, heights = [f"{prefix}.qkv_opreact"], [2 * keys + 2 * values]
        gates = [f"{prefix}.ifgate_preact"]
    else:
        names, heights = [f"{prefix}.{part}" for part in ("q", "k", "v", "ogate_preact")], [keys, keys, values, values]
        gates = [f"{prefix}.{part}gate_preact" for part in "if"]
    each = 2 * heads // len(gates)
    return MLSTM(
        w.linear(*(f"{name}.weight" for name in names), shape=(heights, hidden)),
        FloatWeight(torch.cat([w.tensor(f"{name}.weight", (each, hidden)) for name in gates])),
        torch.cat([w.tensor(f"{name}.bias", (each,)) for name in gates]),
        w.linear(f"{prefix}.out_proj.weight", shape=(hidden, values)),
        Norm(
            w.tensor(f"{prefix}.multihead_norm.weight", (values,)).view(heads, -1),
            shape.eps,
            "layer",
            w.tensor(f"{prefix}.multihead_norm.bias", (values,)).view(heads, -1) if biased else None,
        ),
        heads,
        keys // heads,
        values // heads,
        config.float("gate_soft_cap", low=1e-3, high=MOST_CAP),
        config.float("eps", low=0.0, high=1.0, default=1e-6),
        b.biases(w, *(f"{name}.bias" for name in names), wanted=biased),
        b.biases(w, f"{prefix}.out_proj.bias", wanted=biased),
    )


def feed_forward(w: WeightLoader, prefix: str, hidden: int, inner: int) -> MLP:
    if not w.has(f"{prefix}.proj_up_gate_z.weight"):
        return b.mlp(w, prefix, hidden, inner, "silu", ("proj_up_gate", "proj_up", "proj_down"))
    return MLP(
        w.linear(f"{prefix}.proj_up_gate_z.weight", shape=(2 * inner, hidden)),
        w.linear(f"{prefix}.proj_down.weight", shape=(hidden, inner)),
        "silu",
        up_bias=b.biases(w, f"{prefix}.proj_up_gate_z.bias"),
        down_bias=b.biases(w, f"{prefix}.proj_down.bias"),
    )
