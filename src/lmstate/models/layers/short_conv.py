"""The gated short convolution of LFM2: a layer whose whole memory is its last few inputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmstate import ops
from lmstate.models.layers.base import FusableLayer
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.recurrent.causal_conv import causal_conv, tap_major
from lmstate.state import LayerState, Layout, RecurrentState, Step
from lmstate.state.layers.scans import Carry


@dataclass(frozen=True, eq=False)
class ShortConv(FusableLayer):
    """`out(c * conv(b * x))`, where `project [3 * E, E]` gives b, c and x (Liquid AI, LFM2).

    The scan is the convolution alone; c needs no memory.
    """

    project: Weight
    out: Weight
    conv: Tensor  # [E, C]
    conv_bias: Tensor | None = None
    bias: Tensor | None = None
    out_bias: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "conv", tap_major(self.conv))

    @property
    def kind(self) -> str:
        return "recurrent"

    def new_state(self, layout: Layout) -> LayerState:
        width, kernel = self.conv.shape
        return RecurrentState(layout, self.scan, [(kernel - 1, width)], width, names=["conv"])

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """b * x `[R, T, E]` -> its convolution `[R, T, E]`."""
        y, tail = causal_conv(inputs, carry[0], self.conv, self.conv_bias, counts)
        return y, (tail,)

    def sublayers(self, norm: Norm | None, post_norm: Norm | None, scale: float) -> tuple[ops.Sublayer, ...]:
        sublayer = ops.ShortConvSublayer(
            self.project, self.out, self.conv, self.conv_bias, bias=self.bias, out_bias=self.out_bias,
            norm=norm, post_norm=post_norm, scale=scale,
        )  # fmt: skip
        return (sublayer,)

    def forward(self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        assert isinstance(cache, RecurrentState)
        before, after, x = ops.linear(x, self.project, self.bias, norm=norm).chunk(3, dim=-1)
        y = cache.advance(before * x, step)
        return ops.linear(after * y, self.out, self.out_bias, residual=residual)
