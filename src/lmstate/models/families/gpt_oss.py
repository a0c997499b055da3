"""gpt-oss (2508.10925): attention sinks, a window on every other layer, and experts with a clamped gate.

x = embed(tokens)
x = x + attention(norm(x))                      # a sink a head, a window on every other layer
x = x + sum over chosen e: g_e * expert_e(y)    # y = norm(x)
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.huggingface import mxfp4
from lmstate.checkpoints.loader import WeightLoader, transpose
from lmstate.checkpoints.source import GroupedQuant
from lmstate.models.families import builders as b
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import FloatWeight, Norm, Residual, Weight

DEFAULTS: b.Defaults = {
    "gpt_oss": {
        **b.EPS,
        "sliding_window": 128,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }
}


@dataclass(eq=False)
class ClampedExpert:
    """`down((up + 1) * gate * sigmoid(alpha * gate))`, the gate clamped from above and up on both sides.

    An MLP with the gate "swigluoai" where alpha and limit are those of the published models.
    """

    gate_up: Weight  # [2 * F, E]
    down: Weight
    gate_up_bias: Tensor
    down_bias: Tensor
    alpha: float
    limit: float

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        gate, up = ops.linear(x, self.gate_up, self.gate_up_bias, norm=norm).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ops.linear(
            (up + 1) * gate * ops.sigmoid(self.alpha * gate), self.down, self.down_bias, residual=residual
        )


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE)
    count = b.expert_count(config)
    rope = make_rope(config, shape.head_dim, theta=150_000.0).to(w.device)
    window = b.layer_windows(config, shape.layers, full_every=2)
    alpha, limit = config.float("swiglu_alpha", default=1.702), config.float("swiglu_limit", low=0.0, default=7.0)

    def mixture(prefix: str) -> MixtureOfExperts:
        gate = FloatWeight(w.tensor(f"{prefix}.router.weight", (count, shape.hidden)))
        router_bias = w.tensor(f"{prefix}.router.bias", (count,))
        router = Router(gate, config.int("num_experts_per_tok", low=1, high=count), normalize=True, bias=router_bias)
        inside = f"{prefix}.experts"
        up_biases, down_biases = _biases(w, inside, count, inner, shape.hidden)
        matrices = [_expert(w, inside, index, count, inner, shape.hidden) for index in range(count)]
        experts: list[FeedForward] = []
        for (up, down), up_bias, down_bias in zip(matrices, up_biases, down_biases, strict=True):
            if (alpha, limit) == (1.702, 7.0):
                experts.append(MLP(up, down, "swigluoai", up_bias=up_bias, down_bias=down_bias))
            else:
                experts.append(ClampedExpert(up, down, up_bias, down_bias, alpha, limit))
        return MixtureOfExperts(router, experts)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        mixer = b.attention(w, f"{layer}.self_attn", shape, rope, window=window[index])
        return Block(
            replace(mixer, sinks=w.tensor(f"{layer}.self_attn.sinks", (shape.heads,))),
            mixture(f"{layer}.mlp"),
            b.norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            b.norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )

    return b.decoder(w, shape, block)


def _biases(w: WeightLoader, prefix: str, count: int, inner: int, hidden: int) -> tuple[Tensor, Tensor]:
    """Biases of gate and up, then of down: float32 `[experts, 2 * F]` and `[experts, E]`."""
    down = w.tensor(f"{prefix}.down_proj_bias", (count, hidden))
    if w.has(f"{prefix}.gate_proj_bias"):
        parts = [w.tensor(f"{prefix}.{part}_proj_bias", (count, inner)) for part in ("gate", "up")]
    else:
        both = w.tensor(f"{prefix}.gate_up_proj_bias", (count, 2 * inner))
        parts = [both[:, 0::2], both[:, 1::2]]
    return torch.cat(parts, dim=1), down


def _expert(w: WeightLoader, prefix: str, index: int, count: int, inner: int, hidden: int) -> tuple[Weight, Weight]:
    """One expert's gate over up `[2 * F, E]`, and its down `[E, F]`, from any of three forms.

    Matrices of its own (GGUF); MXFP4 blocks `[experts, N, K / 32, 16]`; floats `[experts, K, N]`. In the last two, rows
    of gate and up alternate.
    """
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    shape, shape_down = (2 * inner, hidden), (hidden, inner)
    own = f"{prefix}.{index}"
    if w.has(f"{own}.down_proj.weight"):
        return (
            w.linear(f"{own}.gate_proj.weight", f"{own}.up_proj.weight", shape=((inner, inner), hidden)),
            w.linear(f"{own}.down_proj.weight", shape=shape_down),
        )
    order = torch.cat([torch.arange(0, 2 * inner, 2), torch.arange(1, 2 * inner, 2)])
    if w.has(f"{down}_blocks"):

        def made(name: str, size: tuple[int, int], rows: Tensor) -> Weight:
            def make(blocks: Tensor, scales: Tensor) -> GroupedQuant:
                return mxfp4.take_apart(blocks, scales).rows(rows)

            names = (f"{name}_blocks", f"{name}_scales")
            outputs, inputs = size
            w.expect(names[0], (count, outputs, inputs // 32, 16))
            w.expect(names[1], (count, outputs, inputs // 32))
            return w.derived(f"{name}[{index}]", *names, make=make, shape=size, stored="int8", of=index)

        return made(gate_up, shape, order), made(down, shape_down, torch.arange(hidden))
    w.expect(gate_up, (count, hidden, 2 * inner))
    w.expect(down, (count, inner, hidden))
    return (
        w.derived(f"{gate_up}[{index}]", gate_up, make=lambda numbers: numbers.T[order], shape=shape, of=index),
        w.derived(f"{down}[{index}]", down, make=transpose, shape=shape_down, of=index),
    )
