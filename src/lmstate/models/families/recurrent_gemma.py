"""RecurrentGemma (Botev et al. 2024): Griffin's recurrent blocks, with local attention in every third layer.

x = embed(tokens) * sqrt(E)
x = x + mixer(norm(x))    # out(gelu(a) * rg_lru(conv(b))), or local attention
x = x + mlp(norm(x))
logits = softcap(head(norm(x)))
"""

from __future__ import annotations

import torch

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.rg_lru import RecurrentBlock
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import quantize

DEFAULTS: b.Defaults = {}

KINDS = ("recurrent", "attention")


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner = config.int("intermediate_size", low=2, high=b.MAX_SIZE) // 2
    act = b.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    rope = make_rope(config, shape.head_dim, fraction=0.5).to(w.device)
    window = config.int("attention_window_size", low=1, default=2048)
    pattern = config.strs("block_types", None, KINDS, default=None) or ("recurrent", "recurrent", "attention")

    def mixer(index: int, prefix: str) -> Mixer:
        if pattern[index % len(pattern)] == "recurrent":
            return recurrent_block(w, prefix, shape, act)
        return b.attention(w, prefix, shape, rope, window=window)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, f"{layer}.temporal_block"),
            b.mlp(w, f"{layer}.mlp_block", shape.hidden, inner, act),
            b.norm(w, f"{layer}.temporal_pre_norm.weight", shape.hidden, shape.eps, plus_one=True),
            b.norm(w, f"{layer}.channel_pre_norm.weight", shape.hidden, shape.eps, plus_one=True),
        )

    return b.decoder(
        w, shape, block,
        final_norm=b.norm(w, "model.final_norm.weight", shape.hidden, shape.eps, plus_one=True),
        embed_scale=float(torch.tensor(shape.hidden**0.5, dtype=torch.bfloat16)),  # as the model was trained
        logit_softcap=config.float("logits_soft_cap", low=1e-3, default=30.0),
    )  # fmt: skip


def recurrent_block(w: WeightLoader, prefix: str, shape: b.Dims, act: str) -> RecurrentBlock:
    width = w.config.int("lru_width", low=1, high=b.MAX_SIZE, default=shape.hidden)
    kernel = w.config.int("conv1d_width", low=1, high=256, default=4)
    if width % shape.heads:
        raise ModelError(f"{w.source.path}: lru_width {width} cannot be cut in {shape.heads} equal blocks")
    size = width // shape.heads
    weights, biases = [], []
    for gate in ("input_gate", "recurrent_gate"):
        weights.append(w.tensor(f"{prefix}.rg_lru.{gate}_weight", (shape.heads, size, size)))
        biases.append(w.tensor(f"{prefix}.rg_lru.{gate}_bias", (shape.heads, size)))
    return RecurrentBlock(
        w.linear(f"{prefix}.linear_x.weight", f"{prefix}.linear_y.weight", shape=((width, width), shape.hidden)),
        torch.cat([w.tensor(f"{prefix}.linear_{part}.bias", (width,)) for part in "xy"]),
        w.linear(f"{prefix}.linear_out.weight", shape=(shape.hidden, width)),
        w.tensor(f"{prefix}.linear_out.bias", (shape.hidden,)),
        w.tensor(f"{prefix}.conv_1d.weight", (width, 1, kernel))[:, 0],
        w.tensor(f"{prefix}.conv_1d.bias", (width,)),
        # As products take them, and in float32: an error in a decay lasts.
        [quantize(block.mT.contiguous(), "float32") for block in torch.cat(weights, dim=-1)],
        torch.cat(biases, dim=-1),
        w.tensor(f"{prefix}.rg_lru.recurrent_param", (width,)),
        act,
    )
