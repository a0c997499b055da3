"""Lightning attention: a linear attention whose heads forget at fixed rates, normalized and gated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmstate import ops
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.recurrent.linear_attention import linear_attention
from lmstate.state import LayerState, Layout, RecurrentState, Step
from lmstate.state.layers.scans import Carry


@dataclass(eq=False)
class Lightning:
    """`out(sigmoid(gate x) * norm(lightning(act(qkv x))))` (MiniMax-01, 2501.08313).

    `project [4 * H * D, E]` gives q, k, v head by head, and then the gate, which needs no memory.
    """

    project: Weight
    out: Weight  # [E, H * D]
    slope: Tensor  # [H]: a head keeps exp(-slope) of what it knew at every token
    norm: Norm  # over all heads together
    head_dim: int
    act: str = "silu"

    @property
    def kind(self) -> str:
        return "recurrent"

    @property
    def width(self) -> int:
        """H * D"""
        return len(self.slope) * self.head_dim

    def new_state(self, layout: Layout) -> LayerState:
        shape = (len(self.slope), self.head_dim, self.head_dim)
        return RecurrentState(layout, self.scan, [shape], 3 * self.width, names=["recurrent"], sums=["recurrent"])

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """q, k, v of each head, before their activation `[R, T, 3 * H * D]` -> `[R, T, H * D]`."""
        qkv = ops.activation(self.act)(inputs).unflatten(-1, (len(self.slope), 3, self.head_dim))
        q, k, v = qkv.unbind(-2)  # [R, T, H, D]
        y, state = linear_attention(q, k, v, (-self.slope).expand(v.shape[:3]), carry[0], counts)
        return y.flatten(-2), (state,)

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, RecurrentState)
        projected = ops.linear(x, self.project, norm=norm)
        inputs, gate = projected.split([3 * self.width, self.width], dim=-1)
        y = ops.gated(self.normed(cache.advance(inputs, step)), gate)
        return ops.linear(y, self.out, residual=residual)

    def normed(self, y: Tensor) -> Tensor:
        """The answers of the heads `[R, T, H * D]` after the norm."""
        return ops.norm(y, self.norm)
