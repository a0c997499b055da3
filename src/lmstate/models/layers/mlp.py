"""Feed-forward block, plain or gated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops import Norm, Residual, Weight


class FeedForward(Protocol):
    """`x [R, T, E] -> [R, T, E]`; `norm` is applied to x first, `residual` is added last."""

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class MLP:
    """`down(act(gate x) * up x)`, with gate and up in one matrix `[2 * F, E]`; `down(act(up x))` if not `gated`.

    `factors` multiply what that matrix and its bias give. `down_norm`: before `down`, of a gated one.
    """

    up: Weight
    down: Weight
    act: str = "silu"
    gated: bool = True
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    factors: Tensor | None = None  # float32 [2 * F]
    down_norm: Norm | None = None

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        if self.gated and self.factors is None and self.down_norm is None:
            return ops.feed_forward(
                x, self.up, self.down, self.act,
                norm=norm, up_bias=self.up_bias, down_bias=self.down_bias, residual=residual,
            )  # fmt: skip
        hidden = ops.linear(x, self.up, self.up_bias, norm=norm)
        hidden = hidden if self.factors is None else hidden * self.factors
        if self.down_norm is not None:
            hidden = ops.glu(hidden, self.act)
            return ops.linear(hidden, self.down, self.down_bias, norm=self.down_norm, residual=residual)
        if self.gated:
            return ops.linear(hidden, self.down, self.down_bias, gate=self.act, residual=residual)
        return ops.linear(ops.activation(self.act)(hidden), self.down, self.down_bias, residual=residual)

    def sublayers(
        self, norm: Norm | None, post_norm: Norm | None, scale: float, parallel: bool
    ) -> tuple[ops.Sublayer, ...]:
        """The MLP with the norms around it as native bodies know it; empty where they do not."""
        if not self.gated or self.down_norm is not None:
            return ()
        sublayer = ops.MLPSublayer(
            self.up, self.down, self.act, self.up_bias, self.down_bias, self.factors, parallel,
            norm=norm, post_norm=post_norm, scale=scale,
        )  # fmt: skip
        return (sublayer,)


@dataclass(frozen=True, eq=False)
class ClampedMLP:
    """`down(act(min(gate x, limit)) * clamp(up x, -limit, limit))`, of a gated MLP without biases."""

    whole: MLP
    limit: float

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        gate, up = ops.linear(x, self.whole.up, norm=norm).chunk(2, dim=-1)
        clamped = torch.cat([gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)], dim=-1)
        return ops.linear(clamped, self.whole.down, gate=self.whole.act, residual=residual)
