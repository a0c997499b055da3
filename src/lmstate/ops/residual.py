"""How a layer's output joins the stream that went into it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lmstate.ops.norm import Norm
from lmstate.ops.norm import norm as apply_norm


class Residual(NamedTuple):
    """`stream + scale * norm(output)`; without a norm, the output itself."""

    stream: Tensor  # float32 [..., N]
    norm: Norm | None = None
    scale: float = 1.0

    @property
    def simple(self) -> bool:
        """Whether the native bodies know it."""
        return self.norm is None or self.norm.simple

    def added(self, output: Tensor) -> Tensor:
        """The stream with an output `[..., N]` in it."""
        output = output if self.norm is None else apply_norm(output, self.norm)
        return self.stream + (output if self.scale == 1.0 else output * self.scale)
