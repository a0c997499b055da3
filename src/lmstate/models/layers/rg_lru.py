"""Griffin's recurrent block: a short convolution and a real-gated linear recurrence, gated by a branch beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.recurrent.causal_conv import causal_conv, tap_major
from lmstate.ops.recurrent.rg_lru import rg_lru
from lmstate.state import LayerState, Layout, RecurrentState, Step
from lmstate.state.layers.scans import Carry


@dataclass(eq=False)
class RecurrentBlock:
    """`out(rg_lru(conv(x)) * act(y))`, where `project [2 * F, E]` gives x and y (De et al. 2024, 2402.19427).

    The input and recurrence gates read the convolution's output block by block: N `gates [2 * F / N, F / N]`, which
    give both. The scan reads x; y needs no memory.
    """

    project: Weight
    bias: Tensor
    out: Weight  # [E, F]
    out_bias: Tensor
    conv: Tensor  # [F, C]
    conv_bias: Tensor
    gates: list[Weight]
    gates_bias: Tensor  # [N, 2 * F / N]
    recurrent_param: Tensor  # [F]
    act: str = "gelu_tanh"

    def __post_init__(self) -> None:
        self.conv = tap_major(self.conv)

    @property
    def kind(self) -> str:
        return "recurrent"

    def new_state(self, layout: Layout) -> LayerState:
        width, kernel = self.conv.shape
        shapes = [(kernel - 1, width), (width,), ()]
        return RecurrentState(layout, self.scan, shapes, width, names=["conv", "recurrent", "seen"], sums=["recurrent"])

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """x `[R, T, F]` -> the states of the recurrence `[R, T, F]`."""
        tail, h, seen = carry
        x, tail = causal_conv(inputs, tail, self.conv, self.conv_bias, counts)
        blocks = x.chunk(len(self.gates), dim=-1)
        products = [ops.linear(*each) for each in zip(blocks, self.gates, self.gates_bias)]
        both = torch.stack(products, dim=-2)  # [R, T, N, 2 * F / N]
        of_input, of_recurrence = (gate.flatten(-2) for gate in both.chunk(2, dim=-1))
        y, (h, seen) = rg_lru(x, of_input, of_recurrence, self.recurrent_param, (h, seen), counts)
        return y, (tail, h, seen)

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, RecurrentState)
        x, gate = ops.linear(x, self.project, self.bias, norm=norm).chunk(2, dim=-1)
        # ops.linear gates as act(first half) * second half.
        both = torch.cat([gate, cache.advance(x, step)], dim=-1)
        return ops.linear(both, self.out, self.out_bias, gate=self.act, residual=residual)
