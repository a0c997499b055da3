"""Mamba-2: a short convolution and a state space whose decay, input and output depend on the token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmstate import ops
from lmstate.models.layers.base import FusableLayer
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.recurrent.causal_conv import tap_major
from lmstate.ops.recurrent.mamba2_mixer import mamba2_mixer
from lmstate.ops.types.mixers import Mamba2Params
from lmstate.state import LayerState, Layout, RecurrentState, Step
from lmstate.state.layers.scans import Carry


@dataclass(frozen=True, eq=False)
class GatedNorm:
    """An RMS norm of `y * silu(gate)`, over each of `groups` parts alone; `gate_last`: of y, then comes the gate."""

    norm: Norm
    groups: int = 1
    gate_last: bool = False


@dataclass(frozen=True, eq=False)
class Mamba2(FusableLayer):
    """The mixer of Dao and Gu 2024 (2405.21060), of H heads of P features, their states N wide, in G groups.

    `project [I + (I + 2 * G * N) + H, E]` gives gate | x, B, C | dt, with I = H * P. The scan reads x, B, C and dt; the
    gate and what comes after it need no memory. `scale` multiplies what was projected, with its bias.
    """

    project: Weight
    out: Weight
    conv: Tensor  # [I + 2 * G * N, C]
    conv_bias: Tensor | None
    A: Tensor  # [H], negative
    D: Tensor  # [H]
    dt_bias: Tensor  # [H]
    groups: int
    state_size: int
    head_dim: int
    norm: GatedNorm | None = None  # None: the gate alone
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    bias: Tensor | None = None
    out_bias: Tensor | None = None
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "conv", tap_major(self.conv))

    @property
    def kind(self) -> str:
        return "recurrent"

    @property
    def inner(self) -> int:
        """I"""
        return self.A.shape[0] * self.head_dim

    @property
    def _params(self) -> Mamba2Params:
        gated = (None, 1, False) if self.norm is None else (self.norm.norm, self.norm.groups, self.norm.gate_last)
        return Mamba2Params(
            self.conv, self.conv_bias, self.A, self.D, self.dt_bias, self.head_dim, self.groups, self.dt_limits, *gated
        )

    def new_state(self, layout: Layout) -> LayerState:
        width, kernel = self.conv.shape
        shapes = [(kernel - 1, width), (len(self.A), self.head_dim, self.state_size)]
        return RecurrentState(layout, self.scan, shapes, width + len(self.A), names=["conv", "ssm"], sums=["ssm"])

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """x, B, C | dt `[R, T, (I + 2 * G * N) + H]`, beside them the gate -> `[R, T, I]`."""
        tail, state = carry
        return mamba2_mixer(inputs, gate, (tail, state), counts, self._params)

    def sublayers(
        self, norm: Norm | None, post_norm: Norm | None, scale: float, parallel: bool = False
    ) -> tuple[ops.Sublayer, ...]:
        sublayer = ops.Mamba2Sublayer(
            self.project, self.out, self._params, self.scale, parallel, bias=self.bias, out_bias=self.out_bias,
            norm=norm, post_norm=post_norm, scale=scale,
        )  # fmt: skip
        return (sublayer,)

    def forward(self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        assert isinstance(cache, RecurrentState)
        projected = ops.linear(x, self.project, self.bias, norm=norm)
        projected = projected if self.scale is None else projected * self.scale
        y = cache.advance(projected[..., self.inner :], step, gate=projected[..., : self.inner])
        return ops.linear(y, self.out, self.out_bias, residual=residual)
