"""A ring of the last queries of every row, for policies that score slots with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lmstate.errors import SnapshotError
from lmstate.state.layers.base import Layout


class LastQueries:
    """A ring of rotated queries, float32 `[R, S, H, D]`: position p in slot `p % S`, S = `count` + `rewind`.

    `heads`: H; `dim`: D.
    """

    def __init__(self, count: int, layout: Layout, heads: int, dim: int):
        self.count, self.size = count, count + layout.rewind
        self.rows, self.device = layout.rows, layout.device
        self.heads, self.dim = heads, dim
        self.ring: Tensor | None = None  # made with the first queries
        self.low = [0] * layout.rows  # the first position of each row whose query is held

    def clone(self) -> LastQueries:
        other = LastQueries.__new__(LastQueries)
        vars(other).update(vars(self))
        other.ring, other.low = None if self.ring is None else self.ring.detach().clone(), list(self.low)
        return other

    def put(self, row: int, start: int, queries: Tensor) -> None:
        """Queries `[n, H, D]` of the positions start, start + 1, ... of a row."""
        ring, end = self.made(), start + len(queries)
        self.low[row] = self.low_after(row, start, end)
        start = max(start, end - self.size)
        where = torch.arange(start, end, device=self.device) % self.size
        ring[row, where] = queries[len(queries) - len(where) :].to(ring)

    def made(self) -> Tensor:
        """The ring."""
        if self.ring is None:
            self.ring = self.room(self.size)
        return self.ring

    def room(self, width: int) -> Tensor:
        """A buffer for the queries of `width` tokens, float32 `[R, T, H, D]`."""
        return torch.zeros(self.rows, width, self.heads, self.dim, dtype=torch.float32, device=self.device)

    def low_after(self, row: int, start: int, end: int) -> int:
        """A row's `low` once the last queries of the positions start .. end - 1 are in the ring."""
        return max(self.low[row] if start else 0, end - self.size)

    def check(self, length: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """The queries of a snapshot. Raises `SnapshotError` where a row of `length` would not have captured them."""
        queries = tensors.get("queries")
        if queries is None:
            raise SnapshotError(f"this layer needs the tensor queries; the snapshot has {sorted(tensors)}")
        fits = queries.ndim == 3 and tuple(queries.shape[1:]) == (self.heads, self.dim)
        if not fits or len(queries) > length or not queries.is_floating_point():
            raise SnapshotError(
                f"the snapshot's queries are {queries.dtype} {list(queries.shape)}; this layer holds torch.float32 "
                f"[up to {length}, {self.heads}, {self.dim}]"
            )
        return queries

    def clear(self, row: int, length: int, queries: Tensor | None) -> None:
        """The row has `length` tokens now, of which only these queries `[n, H, D]` are held, those of the last ones."""
        self.low[row] = length
        if queries is not None and len(queries):
            self.low[row] = length - len(queries)
            self.put(row, self.low[row], queries)

    def held(self, row: int, length: int) -> Tensor:
        """The queries before `length`, at most `count` of them, float32 `[n, H, D]`, the newest last.

        None where all that is held is later: an idle row may have been restored since its step began.
        """
        if self.ring is None:
            return torch.zeros(0, self.heads, self.dim, dtype=torch.float32, device=self.device)
        return self.held_from(row, max(self.low[row], length - self.count, 0), length)

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

    def close(self, row: int, length: int, start: int, stop: int, rotate_by: Callable[[Tensor, int], Tensor]) -> None:
        """The positions start .. stop - 1 are gone and the later ones move up."""
        if self.ring is None:
            return
        later = self.held_from(row, max(stop, self.low[row]), length)
        later = rotate_by(later, start - stop) if len(later) else later
        earlier = self.held_from(row, max(0, self.low[row], start - self.size + len(later)), start)
        self.low[row] = start - len(earlier) if len(later) == length - stop else start + length - stop - len(later)
        both = torch.cat([earlier, later]) if len(later) == length - stop else later
        self.ring[row, torch.arange(self.low[row], self.low[row] + len(both), device=self.device) % self.size] = both

    def held_from(self, row: int, first: int, last: int) -> Tensor:
        assert self.ring is not None
        return self.ring[row, torch.arange(first, max(first, last), device=self.device) % self.size]

    def tensors(self) -> list[Tensor]:
        return [] if self.ring is None else [self.ring]
