"""RWKV-4 (Peng et al. 2023, 2305.13048). Each of its layers is two blocks, for both of its parts remember.

x = norm(embed(tokens))
x = x + out(sigmoid(r) * wkv(k, v))           # r, k, v: of norm(x) and of the token before
x = x + sigmoid(r') * value(relu(k') ** 2)    # r', k': of norm(x) and of the token before
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.embedding import NormedEmbedding
from lmstate.models.layers.rwkv import ChannelMix, TimeMix
from lmstate.models.model import Block, Model
from lmstate.ops import Norm, Weight

DEFAULTS: b.Defaults = {"rwkv": {"vocab_size": 50_277, "hidden_size": 4096, "num_hidden_layers": 32}}

MOST_HALVINGS = 100  # of a float32 number
LAST_EPS = 1e-5  # of the norm after all, whatever the config says of the others


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.attention_free(w.config)
    hidden = shape.hidden
    width = config.int("attention_hidden_size", low=1, high=b.MAX_SIZE, default=hidden)
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE, default=4 * hidden)
    every = config.int("rescale_every", low=-b.MAX_SIZE, high=b.MAX_SIZE, default=6)
    if every > 0 and shape.layers // every > MOST_HALVINGS:
        raise ModelError(
            f"{config.where} asks for {shape.layers} layers and for half a stream after every {every}, which leaves "
            "nothing of it"
        )

    def layer_norm(name: str, layer: int, eps: float = shape.eps) -> Norm:
        # For half precision the stream is halved every few layers, and every addend with it: norms undo that, but for
        # their epsilon, which counts four times as much.
        eps *= 4 ** (layer // every if every > 0 else 0)
        return Norm(w.tensor(f"{name}.weight", (hidden,)), eps, "layer", w.tensor(f"{name}.bias", (hidden,)))

    def matrix(name: str, outputs: int = width, inputs: int = hidden) -> Weight:
        return w.linear(f"{name}.weight", shape=(outputs, inputs))

    def shares(prefix: str, *names: str) -> Tensor:
        return torch.cat([w.tensor(f"{prefix}.time_mix_{name}", (1, 1, hidden))[0] for name in names])

    def time_mix(prefix: str) -> TimeMix:
        return TimeMix(
            matrix(f"{prefix}.key"),
            matrix(f"{prefix}.value"),
            matrix(f"{prefix}.receptance"),
            matrix(f"{prefix}.output", hidden, width),
            shares(prefix, "key", "value", "receptance"),
            -w.tensor(f"{prefix}.time_decay", (width,)).exp(),
            w.tensor(f"{prefix}.time_first", (width,)),
        )

    def channel_mix(prefix: str) -> ChannelMix:
        return ChannelMix(
            matrix(f"{prefix}.key", inner, hidden),
            matrix(f"{prefix}.value", hidden, inner),
            matrix(f"{prefix}.receptance", hidden, hidden),
            shares(prefix, "key", "receptance"),
        )

    def block(index: int) -> Block:
        layer = index // 2
        prefix = f"rwkv.blocks.{layer}"
        if index % 2:
            return Block(channel_mix(f"{prefix}.feed_forward"), None, layer_norm(f"{prefix}.ln2", layer))
        return Block(time_mix(f"{prefix}.attention"), None, layer_norm(f"{prefix}.ln1", layer))

    return b.decoder(
        w,
        replace(shape, layers=2 * shape.layers),
        block,
        embed="rwkv.embeddings",
        entry=NormedEmbedding(layer_norm("rwkv.blocks.0.pre_ln", 0)),
        final_norm=layer_norm("rwkv.ln_out", shape.layers, LAST_EPS),
    )
