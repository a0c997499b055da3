"""The state of a drafter's layer that attends to a context which is made apart from its own tokens (DFlash)."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate import ops
from lmstate.state.layers.attention import AttentionState
from lmstate.state.step import Step, integers


class ContextKeys(AttentionState):
    """Keys and values of a row's context, and after them those of a block that is drafted and never committed."""

    def store(self, k: Tensor, v: Tensor, step: Step) -> None:
        """Store keys and values `[R, T, K, D]` of a step."""
        ops.append(k, v, self.stored("k"), self.stored("v"), step.starts_t, step.counts_t)

    def attend_block(self, q: Tensor, step: Step, params: ops.AttentionParams, *, causal: bool = False) -> Tensor:
        """Attend from q `[R, T, H, D]` of a block to what is before the step's end -> float32 `[R, T, H, D]`.

        Each query sees all of the block, and with a window as far back as its own position lets it. `causal`: only
        what is before it. All rows with tokens have T.
        """
        k, v, window = self.stored("k"), self.stored("v"), self.mask.window
        if causal:
            return ops.attend(q, k, v, step.starts_t, step.counts_t, params, self.mask)
        ends = integers(step.ends)
        if window is None or max(step.ends) <= window:
            return ops.attend_whole(q, k, v, ends, step.counts_t, params)
        # A query that sees the rest of the block is one at its end whose window is longer.
        last, one, count = (ends - 1).clamp(min=0), step.counts_t.clamp(max=1), q.shape[1]
        seen = [
            ops.attend(q[:, at : at + 1], k, v, last, one, params, ops.CausalMask(window + count - 1 - at))
            for at in range(count)
        ]
        return torch.cat(seen, dim=1)
