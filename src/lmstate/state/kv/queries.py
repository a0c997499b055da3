"""The last queries of every row, for policies that score slots by what was asked lately."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lmstate.errors import SnapshotError
from lmstate.state.layer import Layout


class LastQueries:
    """A ring of rotated queries, float32 `[R, S, H, D]`: position p in slot `p % S`, S = `count` + `rewind`."""

    def __init__(self, count: int, layout: Layout):
        self.count, self.size = count, count + layout.rewind
        self.rows, self.device = layout.rows, layout.device
        self.ring: Tensor | None = None  # made with the first queries, which say how many heads there are
        self.low = [0] * layout.rows  # the first position of each row whose query is held

    def clone(self) -> LastQueries:
        other = LastQueries.__new__(LastQueries)
        vars(other).update(vars(self))
        other.ring, other.low = None if self.ring is None else self.ring.clone(), list(self.low)
        return other

    def put(self, row: int, start: int, queries: Tensor) -> None:
        """Queries `[n, H, D]` of the positions start, start + 1, ... of a row."""
        ring, end = self.made(queries[None]), start + len(queries)
        self.wrote(row, start, end)
        start = max(start, end - self.size)
        where = torch.arange(start, end, device=self.device) % self.size
        ring[row, where] = queries[len(queries) - len(where) :].to(ring)

    def made(self, queries: Tensor) -> Tensor:
        """The ring, for queries `[R, n, H, D]`."""
        if self.ring is None:
            self.ring = torch.zeros(self.rows, self.size, *queries.shape[2:], dtype=torch.float32, device=self.device)
        return self.ring

    def wrote(self, row: int, start: int, end: int) -> None:
        """Those of the positions start .. end - 1 were put in the ring, the last ones of them."""
        self.low[row] = max(self.low[row] if start else 0, end - self.size)

    def check(self, length: int, tensors: dict[str, Tensor]) -> Tensor:
        """The queries of a snapshot. Raises `SnapshotError` where a row of `length` would not have captured them."""
        queries = tensors.get("queries")
        if queries is None:
            raise SnapshotError(f"this layer needs the tensor queries; the snapshot has {sorted(tensors)}")
        if queries.ndim != 3 or len(queries) > length or not queries.is_floating_point():
            raise SnapshotError(f"the snapshot's queries are {queries.dtype} {list(queries.shape)} of {length} tokens")
        return queries

    def clear(self, row: int, length: int, queries: Tensor | None) -> None:
        """The row has `length` tokens now, of which only these queries `[n, H, D]` are held, those of the last ones."""
        self.low[row] = length
        if queries is not None and len(queries):
            self.low[row] = length - len(queries)
            self.put(row, self.low[row], queries)

    def held(self, row: int, length: int) -> Tensor:
        """The queries before `length`, at most `count` of them, float32 `[n, H, D]`, the newest last."""
        if self.ring is None:
            return torch.zeros(0, 0, 0, dtype=torch.float32, device=self.device)
        first = max(self.low[row], length - self.count, 0)
        return self.ring[row, torch.arange(first, length, device=self.device) % self.size]

    def before(self, rows: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of some rows: the last `count` queries `[R, count, H, D]`, and where there is one, bool `[R, count]`."""
        held = [self.held(row, length) for row, length in zip(rows, lengths)]
        padded = torch.stack([torch.cat([one.new_zeros(self.count - len(one), *one.shape[1:]), one]) for one in held])
        there = torch.arange(self.count - 1, -1, -1, device=self.device)
        counts = torch.tensor([len(one) for one in held], device=self.device)
        return padded, there < counts[:, None]

    def select(self, rows: Sequence[int | None]) -> LastQueries:
        other = self.clone()
        other.rows = len(rows)
        other.low = [0 if row is None else self.low[row] for row in rows]
        if self.ring is not None:
            other.ring = self.ring[[0 if row is None else row for row in rows]]
        return other

    def close(self, row: int, length: int, start: int, stop: int, turn: Callable[[Tensor, int], Tensor]) -> None:
        """The positions start .. stop - 1 are gone and the later ones move up."""
        if self.ring is None:
            return
        later = self.held_from(row, max(stop, self.low[row]), length)
        later = turn(later, start - stop) if len(later) else later
        earlier = self.held_from(row, max(0, self.low[row], start - self.size + len(later)), start)
        self.low[row] = start - len(earlier) if len(later) == length - stop else start + length - stop - len(later)
        both = torch.cat([earlier, later]) if len(later) == length - stop else later
        self.ring[row, torch.arange(self.low[row], self.low[row] + len(both), device=self.device) % self.size] = both

    def held_from(self, row: int, first: int, last: int) -> Tensor:
        assert self.ring is not None
        return self.ring[row, torch.arange(first, max(first, last), device=self.device) % self.size]

    def tensors(self) -> list[Tensor]:
        return [] if self.ring is None else [self.ring]
