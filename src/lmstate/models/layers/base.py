"""The contract of mixers: layers that mix tokens in a block, by attention or a recurrence. Weights, and no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lmstate import ops
from lmstate.ops import Norm, Residual
from lmstate.state import CompositeState, KeyValueState, LayerState, Layout, RecurrentState, Step


class Mixer(Protocol):
    """`x [R, T, E] -> [R, T, E]`. Its memory is in the `cache` that it made with `new_state`.

    `norm` is applied to x first; `residual` is added last.
    """

    @property
    def kind(self) -> str:
        """The layer kind, as in `State.memory`."""
        ...

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor: ...

    def new_state(self, layout: Layout) -> LayerState: ...


class FusableLayer(ABC):
    """A mixer that native bodies know whole, from the residual stream and back to it."""

    @abstractmethod
    def sublayers(self, norm: Norm | None, post_norm: Norm | None, scale: float) -> tuple[ops.Sublayer, ...]:
        """The layer with the norms around it, one sublayer for each of its caches; empty where no native body does."""

    def rope_tables(self, step: Step) -> ops.RopeTables | None:
        """The rotation of a step's queries and keys, as a fused sublayer takes it."""
        return None

    def fuses(self, step: Step) -> bool:
        """Whether its sublayers, if it has any, are all that it does in this step."""
        return True

    @abstractmethod
    def forward(self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        """The layer as operations one after the other."""

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        """`forward`, as one native call where that can be."""
        stream, post_norm, scale = residual or (None, None, 1.0)
        graph = ops.FusedGraph(x, step.starts_t, step.counts_t, step.new_tokens)
        graph.set_residual(stream, x)
        sublayers = self.sublayers(norm, post_norm, scale) if graph.enabled and self.fuses(step) else ()
        if sublayers and add_sublayers(graph, sublayers, simple_caches(cache), step, self.rope_tables(step)):
            return graph.flush()
        return self.forward(x, step, cache, norm, residual)


def simple_caches(cache: LayerState) -> Sequence[LayerState]:
    """The caches that attend or scan in it, each alone: itself, or its members if it does both."""
    return cache.members if isinstance(cache, CompositeState) and not isinstance(cache, KeyValueState) else (cache,)


def add_sublayers(
    graph: ops.FusedGraph,
    sublayers: Sequence[ops.Sublayer],
    caches: Sequence[LayerState],
    step: Step,
    tables: ops.RopeTables | None,
) -> bool:
    """Add sublayers to a graph, all or none; False where one of them cannot be fused in this step.

    caches: of the first sublayers, one each; the rest, feed-forward parts, need none.
    """
    fusable = []
    for place, sublayer in enumerate(sublayers):
        view = start = None
        if place < len(caches):
            cache = caches[place]
            if isinstance(cache, RecurrentState):
                start = cache.fused_scan_start(step)
            elif isinstance(cache, KeyValueState):
                view = cache.view(step)
        if (one := graph.fusable(sublayer, view=view, start=start, tables=tables)) is None:
            return False
        fusable.append(one)
    for place, one in enumerate(fusable):
        if (result := graph.add(one)) is not None:
            cache = caches[place]
            assert isinstance(cache, RecurrentState)
            cache.record(step, *result, fused=True)
    return True
