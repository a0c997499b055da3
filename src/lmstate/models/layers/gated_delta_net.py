"""Gated delta rule mixers: a short convolution over q, k, v, and a matrix that forgets and corrects itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.base import FusableLayer
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.recurrent.causal_conv import tap_major
from lmstate.ops.recurrent.gated_delta_mixer import gated_delta_mixer
from lmstate.ops.types.mixers import GatedDeltaParams
from lmstate.state import LayerState, Layout, RecurrentState, Step
from lmstate.state.layers.scans import Carry

GateAct: TypeAlias = Literal["silu", "sigmoid"]


@dataclass(frozen=True, eq=False)
class LowRankProjection:
    """A projection through a bottleneck of B features, `up(down x)`; `down` is stacked with its layer's others."""

    up: Weight  # [N, B]
    bias: Tensor | None = None

    def __call__(self, low: Tensor) -> Tensor:
        return ops.linear(low, self.up, self.bias)


@dataclass(frozen=True, eq=False)
class GatedDelta(FusableLayer):
    """Gated DeltaNet (Yang et al. 2024, 2412.06464), and Kimi Delta Attention (2510.26692), a decay a channel.

    H value heads of Dv features read K <= H key heads of D features, each of them H / K times. `qkvz` gives q, k, v and
    the output gate z, one after the other. `gates` gives beta `[H]` and the decay `[H]`, or `[H * D]` for a decay a
    channel; it stays float32, for its errors would last. Where the decay or z come through a bottleneck (`decay_up`,
    `gate_up`), `qkvz` gives q, k, v and then the two bottlenecks instead of z.

    The scan reads q, k, v before their convolution, beta and decay before their nonlinearities. z is not remembered.
    """

    qkvz: Weight
    gates: Weight
    out: Weight  # [E, H * Dv]
    conv: Tensor  # [2 * K * D + H * Dv, C]
    A: Tensor  # [H], negative
    dt_bias: Tensor  # [H], or [H * D] for a decay a channel
    norm: Norm  # of each head's Dv features
    key_heads: int
    key_dim: int
    value_dim: int
    gate_act: GateAct = "silu"
    beta_scale: float = 1.0  # 2: negative eigenvalues (2411.12537)
    floor: float | None = None  # of the log decay, which then follows a sigmoid and not a softplus
    decay_up: LowRankProjection | None = None
    gate_up: LowRankProjection | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "conv", tap_major(self.conv))

    @property
    def kind(self) -> str:
        return "recurrent"

    @property
    def heads(self) -> int:
        """H"""
        return self.A.shape[0]

    @property
    def _params(self) -> GatedDeltaParams:
        return GatedDeltaParams(
            self.conv, self.A, self.dt_bias, self.norm, self.key_heads, self.key_dim, self.gate_act, self.beta_scale,
            self.floor,
        )  # fmt: skip

    def new_state(self, layout: Layout) -> LayerState:
        width, kernel = self.conv.shape
        shapes = [(kernel - 1, width), (self.heads, self.key_dim, self.value_dim)]
        return RecurrentState(
            layout, self.scan, shapes, width + self.heads + len(self.dt_bias), names=["conv", "recurrent"],
            sums=["recurrent"],
        )  # fmt: skip

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """q, k, v | beta | decay `[R, T, F]`, beside them z -> `[R, T, H * Dv]`."""
        tail, state = carry
        return gated_delta_mixer(inputs, gate, (tail, state), counts, self._params)

    def sublayers(self, norm: Norm | None, post_norm: Norm | None, scale: float) -> tuple[ops.Sublayer, ...]:
        if self.decay_up is not None or self.floor is not None:
            return ()
        sublayer = ops.GatedDeltaSublayer(
            self.qkvz, self.out, self.gates, self._params, norm=norm, post_norm=post_norm, scale=scale
        )
        return (sublayer,)

    def forward(self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        assert isinstance(cache, RecurrentState)
        if norm is not None:
            x = ops.norm(x, norm)
        inputs, z = self._projected(x)
        return ops.linear(cache.advance(inputs, step, gate=z), self.out, residual=residual)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q, k, v | beta | decay `[R, T, F]`; z `[R, T, H * Dv]`."""
        gates, width = ops.linear(x, self.gates), len(self.conv)
        if self.decay_up is None or self.gate_up is None:
            return ops.linear_split_concat(x, self.qkvz, width, gates)
        qkv, rest = ops.linear(x, self.qkvz).tensor_split([width], dim=-1)
        low = self.decay_up.up.in_features
        return torch.cat([qkv, gates, self.decay_up(rest[..., :low])], dim=-1), self.gate_up(rest[..., low:])
