"""What mixes tokens in a block: attention or a recurrence. It has weights and no memory."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lmstate.ops import Norm, Residual
from lmstate.state import LayerState, Layout, Step


class Mixer(Protocol):
    """`x [R, T, E] -> [R, T, E]`. What it remembers lies in the `memory` that it made with `new_state`.

    `norm` is applied to x first; `residual` is added last.
    """

    @property
    def kind(self) -> str:
        """The layer kind, as in `State.memory`."""
        ...

    def __call__(
        self, x: Tensor, step: Step, memory: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor: ...

    def new_state(self, layout: Layout) -> LayerState: ...
