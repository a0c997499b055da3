"""Slots of a static state for every position of a row: tensors that are made once and never move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lmstate.errors import CapacityError
from lmstate.state.blocks import Buffer
from lmstate.state.changes import Changes
from lmstate.state.layers.base import Layout
from lmstate.state.step import Step

Buffers = dict[str, Tensor]


class FixedSlots:
    """Named buffers `[R, *heads, S, D]` of S slots: position p of a row is in slot `p % S` of all of them.

    Without a window S is the capacity and nothing wraps; with one they are a ring that holds its span and a step. A
    row's slots hold the positions from `written_to[r] - S` on, where `written_to[r]` is the end of all that was ever
    written. Writing position p overwrites `p - S`, also in a step that is discarded. So a speculative step that wraps
    keeps copies of the overwritten slots.
    """

    def __init__(self, layout: Layout, buffers: Mapping[str, Buffer], window_span: int | None) -> None:
        self.layout, self.window_span = layout, window_span
        slots = layout.capacity or 0
        if window_span is not None:
            slots = min(slots, window_span + layout.chunk)
        self.slots = slots
        """S."""
        try:
            self.buffers: Buffers = {name: buffer.zeros(slots, (layout.rows,)) for name, buffer in buffers.items()}
        except (RuntimeError, TypeError) as error:  # no memory, or more than torch can count
            raise CapacityError(
                f"a static state of {layout.rows} rows and capacity={layout.capacity} was asked for, which has more "
                "slots than there is memory for: give a smaller capacity, or make a state that is not static"
            ) from error
        self.written_to = [0] * layout.rows
        self.views: list[Any] = []
        """Made of the buffers by layers; these never move."""
        self._saved: tuple[Buffers, list[int]] | None = None

    # ---- the step

    def reserve(self, step: Step) -> None:
        if self.window_span is not None:
            # A speculative step may be accepted in part, so all of it stays; another one may overwrite its own past.
            fresh = [count if step.speculative else min(count, step.chunk) for count in step.counts]
            need = max((min(end, self.window_span + new) for end, new in zip(step.ends, fresh)), default=0)
            if need > self.slots:
                raise CapacityError(
                    f"{max(step.counts)} tokens were given with commit=False; a static state takes at most "
                    f"{self.layout.chunk} tokens a row in a step that may be discarded: give fewer at a time"
                )
            overwrites = any(
                count and end - self.slots > max(0, start - self.window_span)
                for start, count, end in zip(step.starts, step.counts, step.ends)
            )
            copies = {name: buffer.clone() for name, buffer in self.buffers.items()} if overwrites else self.buffers
            self._saved = (copies, list(self.written_to))
        self.written_to = [max(written_to, end) for written_to, end in zip(self.written_to, step.ends)]

    def commit(self, step: Step, accepted: Sequence[int], changes: Changes) -> None:
        if self._saved is not None:
            changes.assign(self, "_saved", None)

    def discard(self) -> None:
        if self._saved is not None:
            buffers, written_to = self._saved
            if buffers is not self.buffers:  # what the step overwrote is whole in the copies
                changes = Changes()
                self._hold(buffers, written_to, changes)
                changes.apply()
            self._saved = None

    # ---- moving about

    def earliest_rewind(self, row: int) -> int:
        lost = self.written_to[row] - self.slots  # positions below it are overwritten
        if self.window_span is None or lost <= 0:
            return 0
        return max(0, lost + self.window_span - self.layout.rewind)

    def rewind(self, row: int, to: int, changes: Changes) -> None:
        pass  # a length is all that changes, and it is not kept here

    def select(self, sources: Sequence[int | None], changes: Changes) -> None:
        index = torch.tensor([0 if row is None else row for row in sources], device=self.layout.device)
        empty = [i for i, row in enumerate(sources) if row is None]
        buffers = {name: buffer[index] for name, buffer in self.buffers.items()}
        for buffer in buffers.values():
            buffer[empty] = 0
        self._hold(buffers, [0 if row is None else self.written_to[row] for row in sources], changes)

    def capture(self, row: int, length: int) -> Buffers:
        # From the earliest position that is whole in the slots and still needed by someone.
        first = 0 if self.window_span is None else max(0, length - self.window_span, self.written_to[row] - self.slots)
        where = torch.arange(first, length, device=self.layout.device) % max(self.slots, 1)
        return {name: buffer[row][..., where, :].contiguous() for name, buffer in self.buffers.items()}

    def restore(self, row: int, length: int, stored: Mapping[str, Tensor], changes: Changes) -> None:
        current = self._with_row(self.buffers, row, length, stored)
        count = min(next(iter(stored.values())).shape[-2], self.slots) if stored else 0
        # Only what is put is whole: as if all before it had been overwritten.
        end = length if count == length else length - count + self.slots
        written_to = [*self.written_to[:row], end, *self.written_to[row + 1 :]]
        if self._saved is not None:
            # Other rows are pending: what a discard brings back must hold this row as well.
            earlier, before = self._saved
            before = [*before[:row], end, *before[row + 1 :]]
            kept = self.buffers if earlier is self.buffers else self._with_row(earlier, row, length, stored)
            changes.assign(self, "_saved", (kept, before))
        self._hold(current, written_to, changes)

    def later(self, row: int, length: int, start: int) -> Buffers:
        """The positions from `start` on of a row that has lost none, those that its window has passed too."""
        return {name: buffer[row][..., start:length, :] for name, buffer in self.buffers.items()}

    def drop(self, row: int, length: int, start: int, stop: int, moved: Mapping[str, Tensor], changes: Changes) -> None:
        """Have `moved`, of the positions from `stop` on, follow those before `start`: nothing has wrapped."""
        closed = {name: buffer.clone() for name, buffer in self.buffers.items()}
        for name, buffer in closed.items():
            buffer[row][..., start : start + length - stop, :] = moved[name]
        self._hold(closed, self.written_to, changes)

    def has_lost(self, row: int) -> bool:
        """Whether positions of the row were overwritten."""
        return self.written_to[row] > self.slots

    def tensors(self) -> list[Tensor]:
        saved = [] if self._saved is None or self._saved[0] is self.buffers else list(self._saved[0].values())
        return [*self.buffers.values(), *saved]

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    # ---- slots

    def _with_row(self, buffers: Buffers, row: int, length: int, stored: Mapping[str, Tensor]) -> Buffers:
        """Copies that hold the last positions of a row before `length`, `[..., n, D]` each, as many as there are."""
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        for name, tensor in stored.items():
            count = tensor.shape[-2]
            kept = min(count, self.slots)
            where = torch.arange(length - kept, length, device=self.layout.device) % max(self.slots, 1)
            copies[name][row][..., where, :] = tensor[..., count - kept :, :].to(copies[name])
        return copies

    def _hold(self, buffers: Buffers, written_to: list[int], changes: Changes) -> None:
        """Have the content of `buffers`, in the tensors that there are."""
        changes.assign(self, "written_to", written_to)
        for name, own in self.buffers.items():
            changes.copy(own, buffers[name])
