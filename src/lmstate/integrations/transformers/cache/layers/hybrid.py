"""Layers of the cache with attention and a recurrence side by side (Falcon-H1, Zamba-2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmstate.integrations.transformers.cache.layers.base import Tensors
from lmstate.integrations.transformers.cache.layers.full import GrowingLayer
from lmstate.integrations.transformers.cache.layers.recurrent import FoldLayer
from lmstate.integrations.transformers.cache.layers.sliding import WindowLayer


class HybridLayer(FoldLayer, GrowingLayer):
    """Full attention and a recurrence side by side in one layer."""

    kind = "hybrid"
    dtype: Any
    device: Any

    def __init__(self, number_of_states: int = 1) -> None:
        GrowingLayer.__init__(self)
        FoldLayer.__init__(self, number_of_states=number_of_states)

    def offload(self) -> None:
        FoldLayer.offload(self)
        GrowingLayer.offload(self)

    def prefetch(self) -> None:
        FoldLayer.prefetch(self)
        GrowingLayer.prefetch(self)

    def reset(self) -> None:
        FoldLayer.reset(self)
        GrowingLayer.reset(self)

    def cut(self, length: int, to: int) -> None:
        GrowingLayer.cut(self, length, to)

    def select(self, rows: Tensor) -> None:
        FoldLayer.select(self, rows)
        GrowingLayer.select(self, rows)

    def rows(self) -> int | None:
        return GrowingLayer.rows(self) or FoldLayer.rows(self)

    def capture(self) -> Tensors:
        return {**self.carry(), **GrowingLayer.capture(self)}

    def check(self, length: int, tensors: Tensors) -> None:
        attention, carry = divided(tensors)
        GrowingLayer.check(self, length, attention)
        FoldLayer.check(self, length, carry)

    def put(self, length: int, tensors: Tensors) -> None:
        attention, carry = divided(tensors)
        GrowingLayer.put(self, length, attention)
        self.put_carry(carry)

    def nbytes(self) -> int:
        return GrowingLayer.nbytes(self) + FoldLayer.nbytes(self)


class HybridWindowLayer(FoldLayer, WindowLayer):
    """A sliding window and a recurrence side by side in one layer."""

    kind = "hybrid-window"
    dtype: Any
    device: Any

    def __init__(self, sliding_window: int, number_of_states: int = 1, rewind: int = 16) -> None:
        WindowLayer.__init__(self, sliding_window, rewind)
        FoldLayer.__init__(self, number_of_states=number_of_states)

    def activate_past_recording(self) -> None:
        """Nothing to do, for the recurrence cannot go back either: see `FoldLayer`."""

    def offload(self) -> None:
        FoldLayer.offload(self)
        WindowLayer.offload(self)

    def prefetch(self) -> None:
        FoldLayer.prefetch(self)
        WindowLayer.prefetch(self)

    def reset(self) -> None:
        FoldLayer.reset(self)
        WindowLayer.reset(self)

    def cut(self, length: int, to: int) -> None:
        WindowLayer.cut(self, length, to)

    def select(self, rows: Tensor) -> None:
        FoldLayer.select(self, rows)
        WindowLayer.select(self, rows)

    def rows(self) -> int | None:
        return WindowLayer.rows(self) or FoldLayer.rows(self)

    def capture(self) -> Tensors:
        return {**self.carry(), **WindowLayer.capture(self)}

    def check(self, length: int, tensors: Tensors) -> None:
        attention, carry = divided(tensors)
        WindowLayer.check(self, length, attention)
        FoldLayer.check(self, length, carry)

    def put(self, length: int, tensors: Tensors) -> None:
        attention, carry = divided(tensors)
        WindowLayer.put(self, length, attention)
        self.put_carry(carry)

    def nbytes(self) -> int:
        return WindowLayer.nbytes(self) + FoldLayer.nbytes(self)


def divided(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """What `capture` gave of attention, and of the recurrence."""
    attention = {name: tensor for name, tensor in tensors.items() if name in ("k", "v")}
    return attention, {name: tensor for name, tensor in tensors.items() if name not in attention}
