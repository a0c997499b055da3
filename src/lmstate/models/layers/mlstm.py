"""The mLSTM of xLSTM: a matrix memory with exponential gates, whose answers are normalized a head and gated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.recurrent.mlstm import mlstm
from lmstate.state import LayerState, Layout, RecurrentState, Step
from lmstate.state.layers.scans import Carry


@dataclass(frozen=True, eq=False)
class MLSTM:
    """`out(sigmoid(o) * norm(mlstm(q, k, v, i, f)))` (xLSTM-7B, 2503.13427).

    `project [2 * H * D + 2 * H * Dv, E]` gives q, k, v and the output gate o, which needs no memory. `gates [2 * H, E]`
    gives the input and the forget gate of each head; `gate_cap` bounds them by a tanh.
    """

    project: Weight
    gates: Weight  # float32, for its errors would last
    gates_bias: Tensor  # [2 * H]
    out: Weight  # [E, H * Dv]
    norm: Norm  # of each head, [H, Dv]
    heads: int
    key_dim: int
    value_dim: int
    gate_cap: float
    eps: float  # beside what answers are divided by
    bias: Tensor | None = None
    out_bias: Tensor | None = None

    @property
    def kind(self) -> str:
        return "recurrent"

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of q, k and v, all heads together."""
        return self.heads * self.key_dim, self.heads * self.key_dim, self.heads * self.value_dim

    def new_state(self, layout: Layout) -> LayerState:
        shapes = [(self.heads, self.key_dim, self.value_dim + 1), (self.heads,)]
        return RecurrentState(
            layout,
            self.scan,
            shapes,
            sum(self.widths) + 2 * self.heads,
            names=["recurrent", "peak"],
            sums=["recurrent"],
        )

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """q, k, v | input and forget gates before their bound `[R, T, F]` -> answers `[R, T, H * Dv]`."""
        state, peak = carry
        q, k, v, gates = inputs.split([*self.widths, 2 * self.heads], dim=-1)
        bounded = self.gate_cap * (gates.double() / self.gate_cap).tanh()
        of_input, of_memory = bounded.chunk(2, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))
        y, carry = mlstm(q, k, v, of_input, of_memory, (state, peak), counts, eps=self.eps)
        return y.flatten(-2), carry

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, RecurrentState)
        if norm is not None:
            x = ops.norm(x, norm)
        gates = ops.linear(x, self.gates, self.gates_bias)
        qkv, gate = ops.linear(x, self.project, self.bias).tensor_split([sum(self.widths)], dim=-1)
        y = cache.advance(torch.cat([qkv, gates], dim=-1), step).unflatten(-1, (self.heads, -1))
        y = ops.norm(y, self.norm).flatten(-2)
        return ops.linear(ops.gated(y, gate), self.out, self.out_bias, residual=residual)
