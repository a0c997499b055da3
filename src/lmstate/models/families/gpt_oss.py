"""gpt-oss (2508.10925): attention sinks, a window on every other layer, and experts with a clamped gate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.decoder import Block, Model
from lmstate.models.families.common import MOST, Shape, attention, decoder, expert_count, norm, windows
from lmstate.models.moe import MixtureOfExperts, Router
from lmstate.models.rope import make_rope
from lmstate.models.weights.mxfp4 import take_apart
from lmstate.models.weights.source import GroupedQuant
from lmstate.models.weights.weights import Weights
from lmstate.ops import FloatWeight, Norm, Weight


@dataclass(eq=False)
class ClampedExpert:
    """`down((up + 1) * gate * sigmoid(alpha * gate))`, the gate clamped from above and up on both sides."""

    gate_up: Weight  # [2 * F, E]
    down: Weight
    gate_up_bias: Tensor
    down_bias: Tensor
    alpha: float
    limit: float

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        gate, up = ops.linear(x, self.gate_up, self.gate_up_bias, norm=norm).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ops.linear((up + 1) * gate * (self.alpha * gate).sigmoid(), self.down, self.down_bias, residual=residual)


def build(w: Weights) -> Model:
    config, shape = w.config, Shape.of(w.config)
    inner = config.int("intermediate_size", low=1, high=MOST)
    count = expert_count(config)
    rope = make_rope(config, shape.head_dim, theta=150_000.0)
    window = windows(config, shape.layers, full_every=2)
    alpha, limit = config.float("swiglu_alpha", default=1.702), config.float("swiglu_limit", low=0.0, default=7.0)

    def mixture(prefix: str) -> MixtureOfExperts:
        gate_up_bias = w.tensor(f"{prefix}.experts.gate_up_proj_bias", (count, 2 * inner))
        gate_up_bias = torch.cat([gate_up_bias[:, 0::2], gate_up_bias[:, 1::2]], dim=1)
        down_bias = w.tensor(f"{prefix}.experts.down_proj_bias", (count, shape.hidden))
        gate = FloatWeight(w.tensor(f"{prefix}.router.weight", (count, shape.hidden)))
        return MixtureOfExperts(
            Router(
                gate,
                config.int("num_experts_per_tok", low=1, high=count),
                normalise=True,
                bias=w.tensor(f"{prefix}.router.bias", (count,)),
            ),
            [
                ClampedExpert(
                    _expert(w, f"{prefix}.experts.gate_up_proj", index, (2 * inner, shape.hidden), pairs=True),
                    _expert(w, f"{prefix}.experts.down_proj", index, (shape.hidden, inner)),
                    gate_up_bias[index],
                    down_bias[index],
                    alpha,
                    limit,
                )
                for index in range(count)
            ],
        )

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        mixer = attention(w, f"{layer}.self_attn", shape, rope, window=window[index])
        return Block(
            replace(mixer, sinks=w.tensor(f"{layer}.self_attn.sinks", (shape.heads,))),
            mixture(f"{layer}.mlp"),
            norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )

    return decoder(w, shape, block)


def _expert(w: Weights, name: str, index: int, shape: tuple[int, int], *, pairs: bool = False) -> Weight:
    """One expert's matrix: from MXFP4 blocks `[experts, N, K / 32, 16]`, or from floats stored as `[experts, K, N]`.

    `pairs`: rows of gate and up alternate in the file; they come out as all of the gate, then all of up.
    """
    order = torch.cat([torch.arange(0, shape[0], 2), torch.arange(1, shape[0], 2)]) if pairs else slice(None)

    def from_blocks(blocks: Tensor, scales: Tensor) -> GroupedQuant:
        return take_apart(blocks[index][order], scales[index][order])

    def from_floats(numbers: Tensor) -> Tensor:
        return numbers[index].T[order]

    label = f"{name}[{index}]"
    if w.has(f"{name}_blocks"):
        names = (f"{name}_blocks", f"{name}_scales")
        return w.derived(label, *names, make=from_blocks, shape=shape, stored="int8")
    return w.derived(label, name, make=from_floats, shape=shape)
