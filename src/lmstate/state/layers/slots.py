"""Slots for every position of a row, which keys and values, or latents, lie in: the base of attention states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lmstate.errors import CapacityError, SnapshotError
from lmstate.ops import KVView
from lmstate.state.changes import Changes
from lmstate.state.layers.base import LayerState, Layout
from lmstate.state.step import Step

FIRST_SLOTS = 64

Buffers = dict[str, Tensor]


class SlotState(LayerState):
    """Named buffers `[R, ..., S, D]` of S slots: position p of a row lies in slot `p % S` of all of them.

    Without a span S grows by doubling and nothing wraps. With one, S stops growing when it holds the span and the step,
    and the same slots become a ring: one code path before, at and after the wrap. Nothing says where a row ends but the
    step. A row's slots hold the positions from `written_to[r] - S` on, where `written_to[r]` is the end of all that was
    ever written: writing position p overwrites `p - S`, also in a step that is discarded.

    `buffers` is replaced as a whole and never changed, so that what a step may have to bring back is one reference. Of
    a static layout it is never replaced: there are slots for all from the start, and what was in them is copied back.
    """

    what: str  # is stored, for messages: "keys and values"

    def __init__(
        self,
        layout: Layout,
        widths: Mapping[str, tuple[int, ...]],
        window_span: int | None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ):
        """`widths`: the shape of each buffer without rows and slots, `(K, D)` say.

        `window_span`: the stored positions that some query may still need, those that a rewind brings in sight
        included; None for all of them. `dtypes`: of the buffers that are not in the layout's.
        """
        self.layout = layout
        self.window_span = window_span
        self.view_cache: list[KVView] = []
        """The buffers as attention reads them, once it was asked for. Buffers that are read together share the list."""
        self.lossy = window_span is not None
        slots = layout.capacity or 0
        if window_span is not None:
            slots = min(slots, window_span + (layout.chunk if layout.static else 1))
        self.buffers: Buffers = {
            name: torch.zeros(layout.rows, *heads, slots, width, dtype=dtype, device=layout.device)
            for name, (*heads, width) in widths.items()
            for dtype in [(dtypes or {}).get(name, layout.dtype)]
        }
        self.slots = slots
        """S."""
        self.written_to = [0] * layout.rows
        self._saved: tuple[Buffers, list[int]] | None = None

    # ---- the step

    def reserve(self, step: Step) -> None:
        if self.window_span is None:
            if (need := step.longest) > self.slots:
                self._save()
                self._use(*_resized(self.buffers, self.written_to, self._grown(need, None)))
            self.written_to = [max(written_to, end) for written_to, end in zip(self.written_to, step.ends)]
            return
        # A tentative step may be accepted in part, so all of it must stay; a certain one may overwrite its own past.
        fresh = [count if step.speculative else min(count, step.chunk) for count in step.counts]
        need = max((min(end, self.window_span + new) for end, new in zip(step.ends, fresh)), default=0)
        overwrites = any(
            count and end - max(self.slots, need) > max(0, start - self.window_span)
            for start, count, end in zip(step.starts, step.counts, step.ends)
        )
        if need > self.slots and self.layout.static:
            raise CapacityError(
                f"{max(step.counts)} tokens were given with commit=False; a static state takes at most "
                f"{self.layout.chunk} tokens a row in a step that may be discarded: give fewer at a time"
            )
        self._save()
        if need > self.slots:
            slots = self._grown(need, self.window_span + max(fresh))
            self._use(*_resized(self.buffers, self.written_to, slots))
        elif overwrites:
            copies = {name: buffer.clone() for name, buffer in self.buffers.items()}
            if self.layout.static:
                self._saved = (copies, list(self.written_to))
            else:
                self._use(copies, self.written_to)
        self.written_to = [max(written_to, end) for written_to, end in zip(self.written_to, step.ends)]

    def commit(self, step: Step, accepted: tuple[int, ...], changes: Changes) -> None:
        if self._saved is not None:
            changes.assign(self, "_saved", None)

    def discard(self) -> None:
        if self._saved is not None:
            buffers, written_to = self._saved
            if buffers is not self.buffers:  # the step wrote elsewhere: what it overwrote is whole in the old slots
                changes = Changes()
                self._hold(buffers, written_to, changes)
                changes.apply()
            self._saved = None

    # ---- moving about

    def earliest_rewind(self, row: int, length: int) -> int:
        if self.window_span is None:
            return 0
        lost = self.written_to[row] - self.slots  # positions below it are overwritten
        return max(0, lost + self.window_span - self.layout.rewind) if lost > 0 else 0

    def rewind(self, row: int, length: int, to: int, changes: Changes) -> None:
        pass  # a length is all that changes, and it is not kept here

    def select(self, rows: Sequence[int | None], changes: Changes) -> None:
        source = torch.tensor([0 if row is None else row for row in rows], device=self.layout.device)
        empty = [i for i, row in enumerate(rows) if row is None]
        buffers = {name: buffer[source] for name, buffer in self.buffers.items()}
        for buffer in buffers.values():
            buffer[empty] = 0
        self._hold(buffers, [0 if row is None else self.written_to[row] for row in rows], changes)

    def capture(self, row: int, length: int) -> dict[str, Tensor]:
        # From the earliest position that is whole in the slots and still needed by someone.
        first = 0 if self.window_span is None else max(0, length - self.window_span, self.written_to[row] - self.slots)
        where = torch.arange(first, length, device=self.layout.device) % max(self.slots, 1)
        return {name: buffer[row][..., where, :].contiguous() for name, buffer in self.buffers.items()}

    def restore(
        self, row: int, length: int, tensors: dict[str, Tensor], changes: Changes, *, empty: bool = False
    ) -> None:
        stored = self._checked(length, tensors)
        in_place = empty and not self.layout.static
        current, written_to = self._with_row(self.buffers, self.written_to, row, length, stored, in_place)
        if self._saved is not None:
            # Other rows are pending: what a discard brings back must hold this row as well.
            earlier, before = self._saved
            if earlier is self.buffers:
                changes.assign(self, "_saved", (current, [*before[:row], written_to[row], *before[row + 1 :]]))
            else:
                changes.assign(self, "_saved", self._with_row(earlier, before, row, length, stored, in_place))
        self._hold(current, written_to, changes)

    def kept(self, row: int, length: int) -> list[list[int]]:
        first = next(iter(self.buffers.values()))
        low = self.lowest(length)
        return [list(range(low, length)) for _ in range(first.shape[1] if first.ndim > 3 else 1)]

    def lowest(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        return 0

    def refuses_drop(self, row: int) -> str | None:
        return "its window has forgotten earlier tokens" if self.written_to[row] > self.slots else None

    def drop(self, row: int, length: int, start: int, stop: int, changes: Changes) -> None:
        # Nothing has wrapped, so that position p lies in slot p.
        closed = {name: buffer.clone() for name, buffer in self.buffers.items()}
        for name, buffer in closed.items():
            later = self.moved(name, self.buffers[name][row][..., stop:length, :], start - stop)
            buffer[row][..., start : start + length - stop, :] = later
        self._hold(closed, self.written_to, changes)

    def moved(self, name: str, stored: Tensor, delta: int) -> Tensor:
        """The content of a buffer, `[..., n, D]`, moved by `delta` positions."""
        return stored

    def static_tensors(self) -> dict[str, Tensor]:
        return dict(self.buffers)

    def rebind(self, tensors: dict[str, Tensor]) -> None:
        self.buffers = dict(tensors)

    def tensors(self) -> list[Tensor]:
        held = list(self.buffers.values())
        if self._saved is not None and self._saved[0] is not self.buffers:
            held += self._saved[0].values()
        return held

    # ---- slots

    def _grown(self, need: int, most: int | None) -> int:
        """Number of slots to allocate when `need` are needed: doubling, up to the most that can ever be used."""
        slots = max(need, 2 * self.slots, FIRST_SLOTS)
        limits = [limit for limit in (most, self.layout.capacity) if limit is not None]
        return max(need, min([slots, *limits]))

    def _with_row(
        self, buffers: Buffers, written_to: list[int], row: int, length: int, stored: Buffers, in_place: bool
    ) -> tuple[Buffers, list[int]]:
        """Buffers that hold the last positions of a row before `length`, `[..., n, D]` each, and their `written_to`.

        Copies, with room for them unless the layout is static; `in_place`, those given if there is room.
        """
        count = next(iter(stored.values())).shape[-2]
        if count > _slots(buffers) and not self.layout.static:
            limit = None if self.window_span is None else count
            buffers, written_to = _resized(buffers, written_to, self._grown(count, limit))
        elif not in_place or any(buffer.requires_grad for buffer in buffers.values()):
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        written_to = list(written_to)
        _store(stored, buffers, row, length, written_to)
        return buffers, written_to

    def _hold(self, buffers: Buffers, written_to: list[int], changes: Changes) -> None:
        """Have the content of `buffers`: in them, or, of a static layout, in the tensors that there are."""
        changes.assign(self, "written_to", written_to)
        if self.layout.static:
            for name, own in self.buffers.items():
                changes.copy(own, buffers[name])
        elif buffers is not self.buffers:
            changes.assign(self, "buffers", buffers)
            changes.assign(self, "slots", _slots(buffers))
            changes.clear(self.view_cache)

    def _use(self, buffers: Buffers, written_to: list[int]) -> None:
        """Go on in these buffers."""
        changes = Changes()
        changes.assign(self, "buffers", buffers)
        changes.assign(self, "slots", _slots(buffers))
        changes.assign(self, "written_to", written_to)
        changes.clear(self.view_cache)
        changes.apply()

    def _own(self) -> None:
        """Before a write: have copies of buffers that a backward pass is going to read as they are.

        As with any tensor, what is committed under `torch.no_grad()` is a constant for all that follows.
        """
        if any(buffer.requires_grad for buffer in self.buffers.values()) and not self.layout.static:
            if self._saved is None:
                self._save()
            self._use({name: buffer.clone() for name, buffer in self.buffers.items()}, self.written_to)

    def _save(self) -> None:
        self._saved = (self.buffers, list(self.written_to))

    def _checked(self, length: int, tensors: dict[str, Tensor]) -> Buffers:
        if length == 0 and not tensors:
            return {name: buffer[0][..., :0, :] for name, buffer in self.buffers.items()}
        names = " and ".join(self.buffers)
        if set(tensors) != set(self.buffers):
            raise SnapshotError(f"this layer needs the tensors {names}; the snapshot has {sorted(tensors)}")
        for name, buffer in self.buffers.items():
            tensor, (*heads, _, width) = tensors[name], buffer.shape[1:]
            if tensor.ndim != len(heads) + 2 or [*tensor.shape[:-2], tensor.shape[-1]] != [*heads, width]:
                expected = ", ".join(map(str, [*heads, "stored", width]))
                raise SnapshotError(
                    f"the snapshot's {name} is {list(tensor.shape)}; this layer holds [{expected}]"
                )  # fmt: skip
            if tensor.dtype != buffer.dtype and not (tensor.is_floating_point() and buffer.is_floating_point()):
                kind = "floating point" if buffer.is_floating_point() else buffer.dtype
                raise SnapshotError(f"the snapshot's {name} is {tensor.dtype}; {self.what} are {kind} here")
        counts = [tensors[name].shape[-2] for name in self.buffers]
        least = length if self.window_span is None else min(length, self.window_span - self.layout.rewind)
        if len(set(counts)) != 1 or not least <= counts[0] <= length:
            raise SnapshotError(
                f"the snapshot stores {', '.join(map(str, counts))} positions of this layer's {names}; a row of "
                f"{length} tokens needs the same number of each, {least} to {length}"
            )
        return {name: tensors[name] for name in self.buffers}


def _slots(buffers: Buffers) -> int:
    """S."""
    return next(iter(buffers.values())).shape[-2]


def _resized(buffers: Buffers, written_to: list[int], slots: int) -> tuple[Buffers, list[int]]:
    """Copies with more slots, each position where it now belongs. In their `written_to` what was lost stays lost."""
    old = _slots(buffers)
    larger = {name: b.new_zeros(*b.shape[:-2], slots, b.shape[-1]) for name, b in buffers.items()}
    for row, end in enumerate(written_to):
        for name, buffer in buffers.items():
            if end <= old:
                larger[name][row][..., :end, :] = buffer[row][..., :end, :]
            else:
                positions = torch.arange(end - old, end, device=buffer.device)
                larger[name][row][..., positions % slots, :] = buffer[row][..., positions % old, :]
    return larger, [end if end <= old else end - old + slots for end in written_to]


def _store(stored: Buffers, buffers: Buffers, row: int, length: int, written_to: list[int]) -> None:
    """Put the last positions before `length`, `[..., n, D]` each, in a row of the slots, as many as there are."""
    for name, buffer in buffers.items():
        count, slots = stored[name].shape[-2], buffer.shape[-2]
        kept = min(count, slots)
        where = torch.arange(length - kept, length, device=buffer.device) % max(slots, 1)
        buffer[row][..., where, :] = stored[name][..., count - kept :, :].to(buffer)
        # Only what was put is whole: as if all before it had been overwritten.
        written_to[row] = length if kept == length else length - kept + slots
