"""The mixer of a block that has a feed-forward part alone."""

from __future__ import annotations

from torch import Tensor

from lmstate.ops import Norm, Residual
from lmstate.state import CompositeState, LayerState, Layout, Step


class Identity:
    """Mixes no tokens, adds nothing and remembers nothing."""

    @property
    def kind(self) -> str:
        return "none"

    def new_state(self, layout: Layout) -> LayerState:
        return CompositeState([])

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        return x.new_zeros(()).expand_as(x) if residual is None else residual.stream
