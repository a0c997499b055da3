"""Layers of the cache with attention and a recurrence side by side (Falcon-H1, Zamba-2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmstate.integrations.transformers.cache.layers.base import Tensors
from lmstate.integrations.transformers.cache.layers.full import FullAttentionLayer
from lmstate.integrations.transformers.cache.layers.recurrent import RecurrentLayer
from lmstate.integrations.transformers.cache.layers.sliding import WindowLayer


class HybridLayer(RecurrentLayer, FullAttentionLayer):
    """Full attention and a recurrence side by side in one layer."""

    kind = "hybrid"
    dtype: Any
    device: Any

    def __init__(self, number_of_states: int = 1) -> None:
        FullAttentionLayer.__init__(self)
        RecurrentLayer.__init__(self, number_of_states=number_of_states)

    def offload(self) -> None:
        RecurrentLayer.offload(self)
        FullAttentionLayer.offload(self)

    def prefetch(self) -> None:
        RecurrentLayer.prefetch(self)
        FullAttentionLayer.prefetch(self)

    def reset(self) -> None:
        RecurrentLayer.reset(self)
        FullAttentionLayer.reset(self)

    def cut(self, length: int, to: int) -> None:
        FullAttentionLayer.cut(self, length, to)

    def select(self, rows: Tensor) -> None:
        RecurrentLayer.select(self, rows)
        FullAttentionLayer.select(self, rows)

    def rows(self) -> int | None:
        return FullAttentionLayer.rows(self) or RecurrentLayer.rows(self)

    def capture(self) -> Tensors:
        return {**self.carry(), **FullAttentionLayer.capture(self)}

    def check(self, length: int, tensors: Tensors) -> None:
        attention, carry = divided(tensors)
        FullAttentionLayer.check(self, length, attention)
        RecurrentLayer.check(self, length, carry)

    def put(self, length: int, tensors: Tensors) -> None:
        attention, carry = divided(tensors)
        FullAttentionLayer.put(self, length, attention)
        self.put_carry(carry)

    def nbytes(self) -> int:
        return FullAttentionLayer.nbytes(self) + RecurrentLayer.nbytes(self)


class HybridWindowLayer(RecurrentLayer, WindowLayer):
    """A sliding window and a recurrence side by side in one layer."""

    kind = "hybrid-window"
    dtype: Any
    device: Any

    def __init__(self, sliding_window: int, number_of_states: int = 1, rewind: int = 16) -> None:
        WindowLayer.__init__(self, sliding_window, rewind)
        RecurrentLayer.__init__(self, number_of_states=number_of_states)

    def activate_past_recording(self) -> None:
        """Nothing to do, for the recurrence cannot go back either: see `RecurrentLayer`."""

    def offload(self) -> None:
        RecurrentLayer.offload(self)
        WindowLayer.offload(self)

    def prefetch(self) -> None:
        RecurrentLayer.prefetch(self)
        WindowLayer.prefetch(self)

    def reset(self) -> None:
        RecurrentLayer.reset(self)
        WindowLayer.reset(self)

    def attention_reach(self, length: int) -> int:
        return WindowLayer.reach(self, length)

    def cut(self, length: int, to: int) -> None:
        WindowLayer.cut(self, length, to)

    def select(self, rows: Tensor) -> None:
        RecurrentLayer.select(self, rows)
        WindowLayer.select(self, rows)

    def rows(self) -> int | None:
        return WindowLayer.rows(self) or RecurrentLayer.rows(self)

    def capture(self) -> Tensors:
        return {**self.carry(), **WindowLayer.capture(self)}

    def check(self, length: int, tensors: Tensors) -> None:
        attention, carry = divided(tensors)
        WindowLayer.check(self, length, attention)
        RecurrentLayer.check(self, length, carry)

    def put(self, length: int, tensors: Tensors) -> None:
        attention, carry = divided(tensors)
        WindowLayer.put(self, length, attention)
        self.put_carry(carry)

    def nbytes(self) -> int:
        return WindowLayer.nbytes(self) + RecurrentLayer.nbytes(self)


def divided(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Split captured tensors into those of attention and those of the recurrence."""
    attention = {name: tensor for name, tensor in tensors.items() if name in ("k", "v")}
    return attention, {name: tensor for name, tensor in tensors.items() if name not in attention}
