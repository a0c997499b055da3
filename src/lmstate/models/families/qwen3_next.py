"""Qwen3-Next and Qwen3.5: gated delta rule in most layers, gated attention in every fourth; norms store w - 1.

x = embed(tokens)
x = x + mixer(norm(x))    # the gated delta rule; in every fourth layer gated attention
x = x + mlp(norm(x))      # or experts beside a gated shared one
logits = head(norm(x))

The two differ in how the checkpoint lays out the projections of the delta rule. A head for multi-token prediction
(`mtp.*`, in GGUF a block past the last layer) has attention.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.source import floats
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.gated_delta_net import GateAct, GatedDelta
from lmstate.models.layers.rope import make_rope, position_axes
from lmstate.models.model import Block, Model
from lmstate.ops.weights.grouped import FloatWeight

DEFAULTS: b.Defaults = {}

KINDS = ("linear_attention", "full_attention")


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    rope = make_rope(config, shape.head_dim, fraction=0.25).to(w.device)
    if config.str("model_type").startswith("qwen3_5"):
        rope = replace(rope, axes=position_axes(config, len(rope.frequencies), (11, 11, 10), interleaved=True))
    every = config.int("full_attention_interval", low=1, default=4)
    kinds = config.strs("layer_types", shape.layers, KINDS, default=None) or [
        KINDS[(index + 1) % every == 0] for index in range(shape.layers)
    ]

    def mixer(index: int, layer: str) -> Mixer:
        if index < shape.layers and kinds[index] == "linear_attention":
            return delta(w, f"{layer}.linear_attn", shape)
        q_norm, k_norm = (
            b.norm(w, f"{layer}.self_attn.{part}_norm.weight", shape.head_dim, shape.eps, plus_one=True)
            for part in "qk"
        )
        return b.attention(w, f"{layer}.self_attn", shape, rope, q_norm=q_norm, k_norm=k_norm, gate=True)

    def block(index: int, layer: str = "") -> Block:
        layer = layer or f"model.layers.{index}"
        return Block(
            mixer(index, layer),
            b.qwen_feed_forward(w, index, f"{layer}.mlp", shape, normalize=True),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
        )

    normed = b.rms_norms(w, shape, plus_one=True)
    names = chain(b.mtp_layers(w), b.mtp_layers(w, "model.mtp"), b.layers_past_the_last(w, shape.layers))
    return b.decoder(
        w,
        shape,
        block,
        final_norm=normed("model.norm"),
        heads=b.prediction_heads(w, shape, normed, names, partial(block, shape.layers)),
        ignore=b.mtp_tensors(config, shape),
    )


def delta(w: WeightLoader, prefix: str, shape: b.Dims, *, gate_act: GateAct = "silu") -> GatedDelta:
    config = w.config
    key_heads = config.int("linear_num_key_heads", low=1, high=b.MAX_SIZE)
    heads = config.int("linear_num_value_heads", low=1, high=b.MAX_SIZE)
    key_dim = config.int("linear_key_head_dim", low=1, high=b.MAX_SIZE)
    value_dim = config.int("linear_value_head_dim", low=1, high=b.MAX_SIZE)
    kernel = config.int("linear_conv_kernel_dim", low=1, high=256)
    b.check_shared(w, heads, key_heads)
    values = heads * value_dim
    width = 2 * key_heads * key_dim + values
    if w.has(all_six := f"{prefix}.in_proj.weight"):  # Lara's
        w.expect(all_six, (width + values + 2 * heads, shape.hidden))
        qkvz = w.derived(
            f"{all_six}[qkvz]", all_six, make=lambda rows: floats(rows)[: width + values],
            shape=(width + values, shape.hidden),
        )  # fmt: skip
    elif w.has(together := f"{prefix}.in_proj_qkvz.weight"):
        parts = key_dim, key_dim, values // key_heads, values // key_heads
        qkvz = w.linear(together, shape=(width + values, shape.hidden), order=lambda: _parted(key_heads, parts))
    else:
        qkvz = w.linear(
            f"{prefix}.in_proj_qkv.weight", f"{prefix}.in_proj_z.weight", shape=((width, values), shape.hidden)
        )
    return GatedDelta(
        qkvz,
        FloatWeight(_gates(w, prefix, key_heads, heads, shape.hidden)),
        w.linear(f"{prefix}.out_proj.weight", shape=(shape.hidden, values)),
        b.short_conv(w, prefix, width, kernel),
        -w.tensor(f"{prefix}.A_log", (heads,)).exp(),
        w.tensor(f"{prefix}.dt_bias", (heads,)),
        b.norm(w, b.first_present(w, f"{prefix}.norm.weight", f"{prefix}.out_norm.weight"), value_dim, shape.eps),
        key_heads,
        key_dim,
        value_dim,
        gate_act,
    )


def _parted(key_heads: int, sizes: tuple[int, ...]) -> Tensor:
    """The order of rows in which q of all key heads comes first, then k, v and z; stored is key head by key head."""
    rows = torch.arange(key_heads * sum(sizes)).view(key_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])


def _gates(w: WeightLoader, prefix: str, key_heads: int, heads: int, hidden: int) -> Tensor:
    """Rows of beta, then of the decay, float32 `[2 * H, E]`."""
    if w.has(all_six := f"{prefix}.in_proj.weight"):
        return w.tensor(all_six)[-2 * heads :]
    if not w.has(f"{prefix}.in_proj_ba.weight"):
        return torch.cat([w.tensor(f"{prefix}.in_proj_{part}.weight", (heads, hidden)) for part in "ba"])
    both = w.tensor(f"{prefix}.in_proj_ba.weight", (2 * heads, hidden))  # key head by key head: betas, decays
    return both.unflatten(0, (key_heads, 2, -1)).transpose(0, 1).reshape(2 * heads, hidden)
