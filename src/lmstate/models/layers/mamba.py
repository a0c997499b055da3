"""Mamba: a short convolution and a state space in which every feature has its own time step and decays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.recurrent.causal_conv import causal_conv, tap_major
from lmstate.ops.recurrent.selective_scan import selective_scan
from lmstate.state import LayerState, Layout, RecurrentState, Step
from lmstate.state.layers.scans import Carry


@dataclass(eq=False)
class Mamba:
    """The mixer of Gu and Dao 2023 (2312.00752), of I features with states N wide and time steps of rank Q.

    `project [2 * I, E]` gives x | gate. The scan reads x: what it convolves decides on dt, B and C, through
    `select [Q + 2 * N, I]` and `dt_project [I, Q]`. The gate needs no memory. Falcon-Mamba and Jamba normalize dt, B
    and C in between.
    """

    project: Weight
    select: Weight
    dt_project: Weight
    out: Weight
    conv: Tensor  # [I, C]
    conv_bias: Tensor | None
    dt_bias: Tensor  # [I]
    A: Tensor  # [I, N], negative
    D: Tensor  # [I]
    dt_norm: Norm | None = None
    b_norm: Norm | None = None
    c_norm: Norm | None = None
    bias: Tensor | None = None
    out_bias: Tensor | None = None

    def __post_init__(self) -> None:
        self.conv = tap_major(self.conv)

    @property
    def kind(self) -> str:
        return "recurrent"

    def entered(self, x: Tensor) -> Tensor:
        """The features that the convolution reads `[R, T, I]`, of those that were projected here."""
        return x

    def own(self, x: Tensor) -> Tensor:
        """The features of the state space, of those that were convolved `[R, T, I]`."""
        return x

    def new_state(self, layout: Layout) -> LayerState:
        inner, kernel = self.conv.shape
        return RecurrentState(
            layout, self.scan, [(kernel - 1, inner), tuple(self.A.shape)], inner, names=["conv", "ssm"], sums=["ssm"]
        )

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """x `[R, T, I]`, beside it the gate -> y `[R, T, I]`."""
        tail, state = carry
        x, tail = causal_conv(inputs, tail, self.conv, self.conv_bias, counts, "silu")
        size = self.A.shape[1]
        dt, B, C = ops.linear(x, self.select).split([self.dt_project.in_features, size, size], dim=-1)
        B, C = (part if norm is None else ops.norm(part, norm) for part, norm in ((B, self.b_norm), (C, self.c_norm)))
        dt = ops.linear(dt, self.dt_project, self.dt_bias, norm=self.dt_norm)  # [R, T, I]
        y, state = selective_scan(self.own(x), dt, self.A, B, C, self.D, state, counts, softplus=True, gate=gate)
        return y, (tail, state)

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, RecurrentState)
        x, gate = ops.linear(x, self.project, self.bias, norm=norm).chunk(2, dim=-1)
        y = cache.advance(self.entered(x), step, gate=gate)
        return ops.linear(y, self.out, self.out_bias, residual=residual)


@dataclass(eq=False)
class HeadedMamba(Mamba):
    """A Mamba of H heads, each of which decides on dt, B and C from its own P features (Zamba, 2405.16712).

    `select [H * (Q + 2 * N), P]` and `dt_project [I, Q]` hold those of the heads one below the other.
    """

    heads: int = 1

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        tail, state = carry
        x, tail = causal_conv(inputs, tail, self.conv, self.conv_bias, counts, "silu")
        size, width = self.A.shape[1], self.A.shape[0] // self.heads
        chosen = self._own(ops.linear(x.unflatten(-1, (self.heads, width)), self.select))  # [R, T, H, Q + 2 * N]
        rank = self.dt_project.in_features
        dt = self._own(ops.linear(chosen[..., :rank], self.dt_project)).flatten(-2) + self.dt_bias  # [R, T, I]
        ys, states = [], []
        for head in range(self.heads):
            of = slice(head * width, (head + 1) * width)
            B, C = chosen[:, :, head, rank:].split(size, dim=-1)
            y, kept = selective_scan(
                x[..., of], dt[..., of], self.A[of], B, C, self.D[of], state[:, of], counts, softplus=True,
                gate=None if gate is None else gate[..., of],
            )  # fmt: skip
            ys.append(y)
            states.append(kept)
        return torch.cat(ys, dim=-1), (tail, torch.cat(states, dim=1))

    def _own(self, each: Tensor) -> Tensor:
        """Each head's product with its own matrix, of those with all: `[R, T, H, H * N]` -> `[R, T, H, N]`."""
        return each.unflatten(-1, (self.heads, -1)).diagonal(dim1=-3, dim2=-2).mT.contiguous()
