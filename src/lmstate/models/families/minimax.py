"""MiniMax-Text-01: lightning attention, attention in some layers, and experts; norms inside the stream.

x = embed(tokens)
x = norm(x);  x = a * x + b * mixer(x)    # lightning attention, or attention
x = norm(x);  x = c * x + d * experts(x)
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.lightning import Lightning
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops.weights.grouped import FloatWeight
from lmstate.state import LayerState, Step

DEFAULTS: b.Defaults = {"minimax": b.EPS}

KINDS = ("full_attention", "linear_attention")
GATED_NORM_EPS = 1e-6  # not in the config
BUFFERS = ("*.self_attn.slope_rate", "*.self_attn.query_decay", "*.self_attn.key_decay", "*.self_attn.diagonal_decay")


@dataclass(frozen=True, eq=False)
class NormedBlock(Block):
    """A block whose norms are applied to the stream itself: a part is added to its own normalized input, each weighed.

    `weights`: of the input and of the part, for the mixer and for the feed-forward part.
    """

    fusable: ClassVar[bool] = False

    weights: tuple[tuple[float, float], tuple[float, float]] = ((1.0, 1.0), (1.0, 1.0))

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        assert self.mlp is not None and self.mixer_norm is not None and self.mlp_norm is not None
        (keep, add), (keep_fed, add_fed) = self.weights
        x = ops.norm(x, self.mixer_norm)
        x = x * keep + self.mixer(x, step, cache) * add
        x = ops.norm(x, self.mlp_norm)
        return x * keep_fed + self.mlp(x) * add_fed


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    rope = make_rope(config, shape.head_dim, theta=1e6).to(w.device)
    window = config.int("sliding_window", low=1, default=None)
    kinds = config.strs("layer_types", shape.layers, KINDS, default=None) or [
        KINDS[index % 2] for index in range(shape.layers)
    ]

    def weights(part: str) -> tuple[float, float]:
        """Residual weights: of the input and of the sublayer's output."""
        return config.float(f"{part}_alpha_factor", default=1.0), config.float(f"{part}_beta_factor", default=1.0)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        linear = kinds[index] == "linear_attention"
        prefix = f"{layer}.self_attn"
        return NormedBlock(
            lightning(w, prefix, shape, index) if linear else b.attention(w, prefix, shape, rope, window=window),
            mixture(w, layer, shape),
            b.norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            b.norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
            weights=(weights("linear_attn" if linear else "full_attn"), weights("mlp")),
        )

    return b.decoder(w, shape, block, ignore=BUFFERS)


def lightning(w: WeightLoader, prefix: str, shape: b.Dims, index: int) -> Lightning:
    """Heads forget ever more slowly from the first to the last, and all of them more slowly in later layers."""
    width = shape.heads * shape.head_dim
    out = b.first_present(w, f"{prefix}.out_proj.weight", f"{prefix}.o_proj.weight")  # the second in GGUF
    rates = 2.0 ** (-8.0 / shape.heads * torch.arange(1, shape.heads + 1, dtype=torch.float32))  # [H], as in ALiBi
    return Lightning(
        w.linear(f"{prefix}.qkv_proj.weight", f"{prefix}.output_gate.weight", shape=((3 * width, width), shape.hidden)),
        w.linear(out, shape=(shape.hidden, width)),
        (rates * (1 - index / (shape.layers - 1 + 1e-5) + 1e-5)).to(w.device),
        b.norm(w, f"{prefix}.norm.weight", width, GATED_NORM_EPS),
        shape.head_dim,
        b.activation(w.config),
    )


def mixture(w: WeightLoader, layer: str, shape: b.Dims) -> MixtureOfExperts:
    config, count = w.config, b.expert_count(w.config)
    gate = b.first_present(w, f"{layer}.block_sparse_moe.gate.weight", f"{layer}.mlp.gate.weight")
    router = Router(
        FloatWeight(w.tensor(gate, (count, shape.hidden))),
        config.int("num_experts_per_tok", low=1, high=count),
        normalize=True,
    )
    inner, prefix = config.int("intermediate_size", low=1, high=b.MAX_SIZE), gate.removesuffix("gate.weight")
    return MixtureOfExperts(
        router, b.experts(w, f"{prefix}experts", count, shape.hidden, inner, b.activation(config), b.W1_W3_W2)
    )  # fmt: skip
