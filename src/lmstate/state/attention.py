"""The state of an attention layer: keys and values, full or of a sliding window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import SnapshotError
from lmstate.state.layer import Install, LayerState, Layout
from lmstate.state.step import Step

FIRST_SLOTS = 64


class AttentionState(LayerState):
    """Keys `[R, K, S, D]` and values `[R, K, S, Dv]` in slots: position p of a row lies in slot `p % S`.

    Without a window S grows by doubling and nothing wraps. With one, S stops growing when it holds the window, `rewind`
    slots of slack and the step, and the same slots become a ring: one code path before, at and after the wrap. Nothing
    says where a row ends but the step. A row's slots hold the positions from `high[r] - S` on, where `high[r]` is the
    farthest that was ever written: writing position p overwrites `p - S`, also in a step that is discarded.
    """

    def __init__(
        self,
        layout: Layout,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        window: int | None = None,
        chunk: int | None = None,
        shift: Callable[[Tensor, int], Tensor] | None = None,
    ):
        """`window`: a query sees that many positions, its own included. `chunk`: it sees its own chunk of that size.

        `shift(keys [K, S, D], delta)` rotates keys as if each had stood `delta` positions farther on (None: keys have
        no position); `State.drop` closes a gap with it.
        """
        self.layout = layout
        self.window, self.chunk, self.shift = window, chunk, shift
        reaches = [size for size in (window, chunk) if size is not None]
        # The stored positions that some query may still need: those in sight, and as many as a rewind brings in sight.
        self.span = min(reaches) - 1 + layout.rewind if reaches else None
        self.kind = "attention" if self.span is None else "window"
        self.forgets = self.span is not None
        slots = layout.capacity or 0
        if self.span is not None:
            slots = min(slots, self.span + 1)
        shape = (layout.rows, kv_heads, slots)
        self.k = torch.zeros(*shape, head_dim, dtype=layout.dtype, device=layout.device)
        self.v = torch.zeros(*shape, value_dim or head_dim, dtype=layout.dtype, device=layout.device)
        self.high = [0] * layout.rows
        self._saved: tuple[Tensor, Tensor, list[int]] | None = None

    # ---- the step

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        step: Step,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the new keys and values, then attend: q `[R, T, H, D]`, k `[R, T, K, D]`, v -> float32 `[R, T, H, Dv]`.

        Keys come rotated. None for k and v attends to what is stored, for layers that share this one's memory.
        """
        if k is not None and v is not None:
            ops.append(k, v, self.k, self.v, step.starts_t, step.counts_t)
        return ops.attend(
            q, self.k, self.v, step.starts_t, step.counts_t,
            scale=scale, window=self.window, chunk=self.chunk, softcap=softcap, sinks=sinks,
        )  # fmt: skip

    def reserve(self, step: Step) -> None:
        slots = self.k.shape[2]
        if self.span is None:
            if (need := max(step.ends, default=0)) > slots:
                self._save()
                self.k, self.v = self._resized(self._grown(need, None))
            self.high = [max(high, end) for high, end in zip(self.high, step.ends)]
            return
        # A tentative step may be accepted in part, so all of it must stay; a certain one may overwrite its own past.
        fresh = [count if step.tentative else min(count, step.chunk) for count in step.counts]
        need = max((min(end, self.span + new) for end, new in zip(step.ends, fresh)), default=0)
        overwrites = any(
            count and end - max(slots, need) > max(0, start - self.span)
            for start, count, end in zip(step.starts, step.counts, step.ends)
        )
        self._save()
        if need > slots:
            self.k, self.v = self._resized(self._grown(need, self.span + max(fresh)))
        elif overwrites:
            self.k, self.v = self.k.clone(), self.v.clone()
        self.high = [max(high, end) for high, end in zip(self.high, step.ends)]

    def commit(self, step: Step, accepted: tuple[int, ...]) -> Install | None:
        return self._release if self._saved is not None else None

    def discard(self) -> None:
        if self._saved is not None:
            k, v, high = self._saved
            if k is not self.k:  # the step wrote elsewhere: what it overwrote is whole in the old slots
                self.k, self.v, self.high = k, v, high
            self._saved = None

    # ---- moving about

    def reach(self, row: int, length: int) -> int:
        if self.span is None:
            return 0
        lost = self.high[row] - self.k.shape[2]  # positions below it are overwritten
        return max(0, lost + self.span - self.layout.rewind) if lost > 0 else 0

    def rewind(self, row: int, length: int, to: int) -> Install | None:
        return None  # a length is all that changes, and it is not kept here

    def select(self, rows: Sequence[int | None]) -> Install | None:
        source = torch.tensor([0 if row is None else row for row in rows], device=self.k.device)
        empty = [i for i, row in enumerate(rows) if row is None]
        k, v = self.k[source], self.v[source]
        k[empty], v[empty] = 0, 0
        high = [0 if row is None else self.high[row] for row in rows]

        def install() -> None:
            self.k, self.v, self.high = k, v, high

        return install

    def capture(self, row: int, length: int) -> dict[str, Tensor]:
        first = self._first(row, length)
        slots = self._slots(first, length)
        return {"k": self.k[row][:, slots].contiguous(), "v": self.v[row][:, slots].contiguous()}

    def restore(self, row: int, length: int, tensors: dict[str, Tensor]) -> Install | None:
        k, v = self._checked(length, tensors)
        stored = k.shape[1]
        current = (self.k, self.v)
        if stored > self.k.shape[2]:
            current = self._resized(self._grown(stored, None if self.span is None else stored))
        forked = self._saved is not None and self._saved[0] is not self.k

        def install() -> None:
            if self._saved is not None:
                # Other rows are pending: what a discard brings back must hold this row as well.
                saved = self._saved if forked else (*current, self._saved[2])
                _store(k, v, saved[0], saved[1], row, length, saved[2])
                self._saved = saved
            self.k, self.v = current
            _store(k, v, self.k, self.v, row, length, self.high)

        return install

    def tensors(self) -> list[Tensor]:
        held = [self.k, self.v]
        if self._saved is not None and self._saved[0] is not self.k:
            held += self._saved[:2]
        return held

    # ---- slots

    def _first(self, row: int, length: int) -> int:
        """The earliest position worth capturing: whole in the slots, and still needed by someone."""
        if self.span is None:
            return 0
        return max(0, length - self.span, self.high[row] - self.k.shape[2])

    def _slots(self, first: int, stop: int) -> Tensor:
        return torch.arange(first, stop, device=self.k.device) % max(self.k.shape[2], 1)

    def _grown(self, need: int, most: int | None) -> int:
        """How many slots to have when `need` are needed: doubling, but never past what can ever be used."""
        slots = max(need, 2 * self.k.shape[2], FIRST_SLOTS)
        limits = [limit for limit in (most, self.layout.capacity) if limit is not None]
        return max(need, min([slots, *limits]))

    def _resized(self, slots: int) -> tuple[Tensor, Tensor]:
        """Copies of the buffers with more slots, each position moved to where it now belongs."""
        old = self.k.shape[2]
        k = self.k.new_zeros(*self.k.shape[:2], slots, self.k.shape[3])
        v = self.v.new_zeros(*self.v.shape[:2], slots, self.v.shape[3])
        for row, high in enumerate(self.high):
            if high <= old:
                k[row, :, :high], v[row, :, :high] = self.k[row, :, :high], self.v[row, :, :high]
                continue
            positions = torch.arange(high - old, high, device=k.device)
            k[row][:, positions % slots] = self.k[row][:, positions % old]
            v[row][:, positions % slots] = self.v[row][:, positions % old]
        return k, v

    def _save(self) -> None:
        self._saved = (self.k, self.v, list(self.high))

    def _release(self) -> None:
        self._saved = None

    def _checked(self, length: int, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if length == 0 and not tensors:
            return self.k[0, :, :0], self.v[0, :, :0]
        if set(tensors) != {"k", "v"}:
            raise SnapshotError(f"an attention layer needs the tensors k and v; the snapshot has {sorted(tensors)}")
        k, v = tensors["k"], tensors["v"]
        for name, tensor, own in (("k", k, self.k), ("v", v, self.v)):
            heads, width = own.shape[1], own.shape[3]
            if tensor.ndim != 3 or tensor.shape[0] != heads or tensor.shape[2] != width:
                raise SnapshotError(
                    f"the snapshot's {name} is {list(tensor.shape)}; this layer holds [{heads}, stored, {width}]"
                )
            if not tensor.dtype.is_floating_point:
                raise SnapshotError(f"the snapshot's {name} is {tensor.dtype}; keys and values are floating point")
        least = length if self.span is None else min(length, self.span - self.layout.rewind)
        if k.shape[1] != v.shape[1] or not least <= k.shape[1] <= length:
            raise SnapshotError(
                f"the snapshot stores {k.shape[1]} keys and {v.shape[1]} values of this layer; "
                f"a row of {length} tokens needs {least} to {length} of both"
            )
        return k, v


def _store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, row: int, length: int, high: list[int]) -> None:
    """Put the last positions before `length`, k `[K, n, D]` and v, in a row of the slots, as many as there are."""
    stored, slots = k.shape[1], keys.shape[2]
    kept = min(stored, slots)
    where = torch.arange(length - kept, length, device=keys.device) % max(slots, 1)
    keys[row][:, where] = k[:, stored - kept :].to(keys)
    values[row][:, where] = v[:, stored - kept :].to(values)
    # Only what was put is whole: as if all before it had been overwritten.
    high[row] = length if kept == length else length - kept + slots
