"""Learned tokens that a layer's queries attend to beside their text (LLaMA-Adapter, 2303.16199)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmstate import ops
from lmstate.ops import RopeTables
from lmstate.state import Step
from lmstate.state.step import integers


@dataclass(frozen=True, eq=False)
class AdaptionPrompt:
    """Keys and values `[K, S, D]` of S learned tokens, which have no position, in a softmax of their own.

    `gate` float32 `[1]` multiplies the output of each head. `behind`: it is added to the layer's output, not to what
    the output projection reads.
    """

    keys: Tensor
    values: Tensor
    gate: Tensor
    behind: bool = False

    def attend(self, q: Tensor, rotation: RopeTables | None, step: Step, scale: float) -> Tensor:
        """Queries `[R, T, H, D]`, before their rotation -> float32 `[R, T, H, D]`."""
        if rotation is not None:
            q = ops.rope(q, *rotation)
        keys, values = (part.expand(len(q), -1, -1, -1).contiguous() for part in (self.keys, self.values))
        lengths = integers([self.keys.shape[1]] * len(q))
        return self.gate * ops.attend_whole(q, keys, values, lengths, step.counts_t, ops.AttentionParams(scale))
