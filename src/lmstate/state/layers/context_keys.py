"""The state of a drafter's layer that attends to a context which is made apart from its own tokens (DFlash)."""

from __future__ import annotations

from torch import Tensor

from lmstate import ops
from lmstate.state.layers.attention import AttentionState
from lmstate.state.step import Step, integers


class ContextKeys(AttentionState):
    """Keys and values of a row's context, and behind them those of a block that is drafted and never committed."""

    def store(self, k: Tensor, v: Tensor, step: Step) -> None:
        """Store keys and values `[R, T, K, D]` of a step."""
        ops.append(k, v, self.stored("k"), self.stored("v"), step.starts_t, step.counts_t)

    def attend_block(self, q: Tensor, step: Step, params: ops.AttentionParams) -> Tensor:
        """Attend from q `[R, T, H, D]` to all before a step's end -> float32 `[R, T, H, D]`."""
        ends = integers(step.ends)
        return ops.attend_whole(q, self.stored("k"), self.stored("v"), ends, step.counts_t, params)
