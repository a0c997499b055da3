"""Beam: gated attention, windows, experts in groups, and a stream that each part moves by ever less.

x_1 = embed(tokens)
x_n = sqrt((n - 1) / n) * x_(n-1) + sqrt(1 / n) * norm(part(norm(x_(n-1))))    # n from 2
logits = head(norm(x_n))

The stream here is sqrt(n) times that one, to which parts are added whole; norms before a part make up for it in the
number that they add. Layers without a window know no positions; their queries grow with the length of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention, Temperature
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Norm

DEFAULTS: b.Defaults = {
    "beam": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 512,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "final_logit_softcapping": 30.0,
    }
}
F, S = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class PowerTemperature(Temperature):
    """Queries grow by `(1 + n / every) ** strength` at token n."""

    def _factors(self, positions: Tensor) -> Tensor:
        return torch.exp(self.strength * torch.log1p((positions + self.first).double() / self.every)).float()


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    kinds = config.strs("layer_types", shape.layers, (F, S), default=None) or [
        S if (index + 1) % 6 and index < shape.layers - 1 else F for index in range(shape.layers)
    ]
    size, feed_forward = config.int("sliding_window", low=1), b.deepseek_feed_forward(w, shape)
    ropes = config.fields("rope_parameters")
    turns = {kind: ropes.given(kind) if ropes is not None else kind == S for kind in (F, S)}
    made = {kind: make_rope(config, shape.head_dim, kind=kind).to(w.device) for kind in (F, S) if turns[kind]}
    slowed = PowerTemperature(2048, 0.1)
    normed = b.rms_norms(w, shape)

    def at_depth(name: str, depth: int) -> Norm:
        return replace(normed(name), eps=shape.eps * depth)

    def mixer(index: int, name: str) -> Attention:
        kind = kinds[index]
        q_norm, k_norm = b.head_norms(w, name, shape)
        width = shape.heads * shape.head_dim
        attention = b.attention(
            w, name, shape, made.get(kind), window=size if kind == S else None, q_norm=q_norm, k_norm=k_norm,
            gates=("gate_proj", width),
        )  # fmt: skip
        gates = w.tensor(f"{name}.gate_bias", (shape.heads,)).repeat_interleave(shape.head_dim)
        bias = gates.new_zeros(attention.qkv.out_features) if attention.qkv_bias is None else attention.qkv_bias
        bias = torch.cat([bias[:-width], gates])
        return replace(attention, qkv_bias=bias, temperature=None if kind in made else slowed)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, f"{layer}.self_attn"),
            feed_forward(index, f"{layer}.mlp"),
            at_depth(f"{layer}.input_layernorm", 2 * index + 1),
            at_depth(f"{layer}.pre_feedforward_layernorm", 2 * index + 2),
            normed(f"{layer}.post_attention_layernorm"),
            normed(f"{layer}.post_feedforward_layernorm"),
        )

    return b.decoder(
        w,
        shape,
        block,
        final_norm=at_depth("model.norm", 2 * shape.layers + 1),
        logit_softcap=config.float("final_logit_softcapping", low=1e-6, default=None),
    )
