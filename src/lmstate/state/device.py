"""Steps of a static state that run from device tensors, before the host has seen their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate.errors import CapacityError, UnsupportedError
from lmstate.state.changes import Changes
from lmstate.state.layers.base import Layout
from lmstate.state.rows import Row
from lmstate.state.step import DeviceStep


@dataclass(frozen=True)
class DeviceResult:
    """Outputs of a device step, not yet read by the host."""

    tokens: Tensor  # int64 [R, T]
    counts: Tensor | None  # int64 [R]; None: T in every row
    logits: Tensor  # float32 [R, T, V], or [R, V] of the last tokens

    def read(self) -> tuple[list[list[int]], list[int]]:
        """Token ids and counts on the host: this waits for the device."""
        tokens = self.tokens.tolist()
        return tokens, [len(ids) for ids in tokens] if self.counts is None else self.counts.tolist()


class DeviceSteps:
    """Start positions of the rows' next tokens, on the device, and the step that has run from there."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.positions = torch.zeros(layout.rows if layout.static else 0, dtype=torch.int64, device=layout.device)
        """int64 `[R]`; of a static state the same tensor always."""
        self.result: DeviceResult | None = None

    def plan(self, width: int, counts: Tensor | None = None) -> tuple[DeviceStep, Tensor]:
        """See `State.device_step`."""
        capacity = self.layout.capacity
        if not self.layout.static or capacity is None:
            raise UnsupportedError("a step from device tensors needs a state made with new_state(..., static=True)")
        if width > min(self.layout.chunk, capacity):
            raise CapacityError(
                f"a step of {width} tokens was asked for; this state takes at most "
                f"{min(self.layout.chunk, capacity)} at a time: feed them in parts"
            )
        if counts is None:
            counts = torch.full_like(self.positions, width)
        room = (counts >= 0) & (counts <= width) & (self.positions + counts <= capacity)
        return DeviceStep.at(self.positions, torch.where(room, counts, 0), width), room

    def sync(self, rows: Sequence[Row], changes: Changes) -> None:
        """Write where the rows stand. A row that misses tokens stands where no step has room."""
        if self.layout.static:
            full = self.layout.capacity
            at = [row.cached if row.cached == row.length else full for row in rows]
            changes.copy(self.positions, torch.tensor(at))
