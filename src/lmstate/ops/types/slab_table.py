"""Stored vectors that lie in blocks of slabs, on a device where each operation is a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import is_
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmstate.ops.types.block_table import BLOCK_TOKENS, Block, BlockTable, RowBlocks
from lmstate.ops.types.slabs import Run, SlabBlock, block_runs, gather, on_device, position_runs, scatter


class SlabRows:
    """Rows of blocks in slabs, and where the blocks lie that were last asked for: keys and values lie alike."""

    def __init__(self, rows: Sequence[RowBlocks]) -> None:
        """`rows`: followed as they change."""
        self.rows = rows
        self._last: dict[str, tuple[object, list[object], list[Run]]] = {}

    def blocks(self, rows: Sequence[int], firsts: Sequence[int], count: int) -> list[Run]:
        """`count` blocks of each of these rows from its own first on; of zeros where it has none. Empty if no row has
        any."""
        return self._found("read", (rows, firsts, count), rows, lambda: self._read(rows, firsts, count))

    def positions(self, starts: Sequence[int], counts: Sequence[int]) -> list[Run]:
        """`counts[r]` positions of row r from `starts[r]` on."""
        rows = range(len(counts))
        return self._found("write", (starts, counts), rows, lambda: self._written(starts, counts))

    def forget(self) -> None:
        """Hold no blocks that rows gave up."""
        self._last.clear()

    def _found(self, what: str, key: object, rows: Sequence[int], find: Callable[[], list[Run]]) -> list[Run]:
        held: list[object] = [self.rows[r].blocks for r in rows]
        last = self._last.get(what)
        if last is None or last[0] != key or not all(map(is_, last[1], held)):
            last = self._last[what] = key, held, find()
        return last[2]

    def _read(self, rows: Sequence[int], firsts: Sequence[int], count: int) -> list[Run]:
        held = [_in_slabs(self.rows[r].blocks[first : first + count]) for r, first in zip(rows, firsts)]
        some = next((blocks[0] for blocks in held if blocks), None)
        if some is None:
            return []
        nothing = SlabBlock(some.slab, 0)
        return block_runs([block for own in held for block in (*own, *repeat(nothing, count - len(own)))])

    def _written(self, starts: Sequence[int], counts: Sequence[int]) -> list[Run]:
        spans = []
        for row, start, count in zip(self.rows, starts, counts):
            if count:
                first, place = divmod(start, BLOCK_TOKENS)
                blocks = _in_slabs(row.blocks[first : -(-(start + count) // BLOCK_TOKENS)])
                spans.append((blocks, place, place + count))
        return position_runs(spans)


def _in_slabs(blocks: Sequence[Block | None]) -> Sequence[SlabBlock]:
    assert None not in blocks, "no room was reserved for the step, or a row's blocks do not follow each other"
    return cast(Sequence[SlabBlock], blocks)


class SlabTable(BlockTable):
    """A `BlockTable` whose rows are read and written by one launch each, unless gradients follow."""

    def __init__(
        self, places: SlabRows, buffer: int, pointers: NDArray[np.int64], heads: int, width: int, like: Tensor
    ) -> None:
        """`places`: of the rows, for the tables of all buffers."""
        super().__init__(places.rows, buffer, pointers, heads, width, like)
        self.places = places

    def forget(self) -> None:
        self.places.forget()

    def read(self, rows: Sequence[int], firsts: Sequence[int], count: int) -> Tensor:
        """`count` blocks of each of these rows from its own first on, `[n, K, count * B, D]`; zeros where it has none.

        Where they follow each other in memory it is a view.
        """
        found = self.places.blocks(tuple(rows), tuple(firsts), count) if count else []
        if not found:
            shape = (len(rows), self.heads, count * BLOCK_TOKENS, self.width)
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        whole = gather(self.buffer, found)
        return whole.view(len(rows), count * BLOCK_TOKENS, self.heads, self.width).transpose(1, 2)

    def span(self, rows: range, low: int, end: int, tracked: bool = False) -> Tensor:
        if tracked or self.requires_grad:
            return super().span(rows, low, end, tracked)
        first = low // BLOCK_TOKENS
        found = self.read(rows, [first] * len(rows), -(-end // BLOCK_TOKENS) - first)
        return found[:, :, low - first * BLOCK_TOKENS : end - first * BLOCK_TOKENS]

    def dense(self) -> Tensor:
        held = [row.blocks for row in self.rows]
        begins = [next((i for i, block in enumerate(row) if block is not None), len(row)) for row in held]
        count = max((len(row) - begin for row, begin in zip(held, begins)), default=0)
        if self.requires_grad or any(begin % count for begin in begins if count):
            return super().dense()
        rings = self.read(range(len(held)), begins, count)
        return rings.clone() if torch.is_grad_enabled() else rings

    def write(self, new: Tensor, starts: Tensor, counts: Tensor) -> None:
        if self.requires_grad or new.requires_grad:
            super().write(new, starts, counts)
            return
        spans, width = counts.tolist(), new.shape[1]
        values = new.flatten(0, 1)
        if any(count != width for count in spans):
            real = chain.from_iterable(range(r * width, r * width + count) for r, count in enumerate(spans))
            values = values.index_select(0, on_device(tuple(real), new.device))
        if values.shape[0]:
            scatter(self.buffer, self.places.positions(starts.tolist(), spans), values)
