"""The experts that a router chose, where a body runs all of them at once."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cuda import experts as cuda
from lmstate.ops.types.sublayers import Expert


class RoutedExperts:
    """The experts of one mixture, for bodies that find their weights by a table."""

    def __init__(self, experts: tuple[Expert, ...]) -> None:
        self.experts = experts

    @cached_property
    def _table(self) -> cuda.ExpertTable | None:
        return cuda.ExpertTable(self.experts) if cuda.ExpertTable.fits(self.experts) else None

    @cached_property
    def _parameters(self) -> list[Tensor]:
        parts = [(each.up.storage, each.down.storage, each.up_bias, each.down_bias) for each in self.experts]
        return [part for each in parts for part in each if part is not None]

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor, scale_input: bool) -> Tensor | None:
        """The weighted outputs of each token's experts, float32 `[M, N]`; None where no body runs them.

        x: float32 `[M, E]`; weights: float32 and chosen: int64 `[M, top_k]`, different experts for each token. A weight
        multiplies what its expert gives, or what it is given if `scale_input`.
        """
        if not dispatch.gpu(x, weights, *self._parameters) or (table := self._table) is None:
            return None
        return cuda.experts(x, weights, chosen, table, scale_input)
