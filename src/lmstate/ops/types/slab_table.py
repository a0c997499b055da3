"""Stored vectors that are in blocks of slabs, on a device where each operation is a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmstate.ops.types.block_table import BLOCK_TOKENS, BlockTable, KVBlock, RowBlocks
from lmstate.ops.types.slabs import Run, SlabBlock, Span, block_runs, clear, gather, on_device, position_runs, scatter

Value = TypeVar("Value")


class SlabRows:
    """Rows of blocks in slabs, and where the blocks are that were last asked for: keys and values are alike."""

    def __init__(self, rows: Sequence[RowBlocks]) -> None:
        """`rows`: followed as they change."""
        self.rows = rows
        self._read: Found[list[Run]] = Found()
        self._written: Found[tuple[list[Run], list[Run]]] = Found()

    def blocks(self, rows: Sequence[int], spans: Sequence[range], count: int) -> list[Run]:
        """Of each of these rows its own span of blocks, and blocks of zeros after them, `count` in all. Empty if no
        row has any."""
        return self._read.get((rows, spans, count), self._held(rows), lambda: self._blocks(rows, spans, count))

    def positions(self, starts: Sequence[int], counts: Sequence[int]) -> tuple[list[Run], list[Run]]:
        """`counts[r]` positions of row r from `starts[r]` on, which are to be written; and those after them that hold
        what was discarded."""
        held = self._held(range(len(counts)))
        return self._written.get((starts, counts), held, lambda: self._positions(starts, counts))

    def forget(self) -> None:
        """Hold no blocks that rows gave up."""
        self._read, self._written = Found(), Found()

    def _held(self, rows: Sequence[int]) -> list[object]:
        return [self.rows[r].blocks for r in rows]

    def _blocks(self, rows: Sequence[int], spans: Sequence[range], count: int) -> list[Run]:
        held = [_in_slabs(self.rows[r].blocks[span.start : span.stop]) for r, span in zip(rows, spans)]
        some = next((blocks[0] for blocks in held if blocks), None)
        if some is None:
            return []
        nothing = SlabBlock(some.slab, 0)
        return block_runs([block for own in held for block in (*own, *repeat(nothing, count - len(own)))])

    def _positions(self, starts: Sequence[int], counts: Sequence[int]) -> tuple[list[Run], list[Run]]:
        spans: list[Span] = []
        stale: list[Span] = []
        for row, start, count in zip(self.rows, starts, counts):
            if not count:
                continue
            first, place = divmod(start, BLOCK_TOKENS)
            *whole, last = blocks = _in_slabs(row.blocks[first : -(-(start + count) // BLOCK_TOKENS)])
            spans.append((blocks, place, place + count))
            end = (place + count - 1) % BLOCK_TOKENS + 1
            if last.filled > end:
                stale.append(([last], end, last.filled))
            last.filled = max(last.filled, end)
            for block in whole:
                block.filled = BLOCK_TOKENS
        return position_runs(spans), position_runs(stale)


class Found(Generic[Value]):
    """Memory of the last answer, for whom asks the same of the same blocks."""

    def __init__(self) -> None:
        self._last: tuple[object, list[object], Value] | None = None

    def get(self, key: object, held: list[object], find: Callable[[], Value]) -> Value:
        last = self._last
        if last is None or last[0] != key or not all(map(is_, last[1], held)):
            last = self._last = key, held, find()
        return last[2]


def _in_slabs(blocks: Sequence[KVBlock | None]) -> Sequence[SlabBlock]:
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
        self._addresses: Found[Tensor] = Found()
        self._array: Found[NDArray[np.int64]] = Found()

    def forget(self) -> None:
        self.places.forget()
        self._addresses, self._array = Found(), Found()

    def addresses(self) -> Tensor:
        """Addresses of the blocks of all rows, int64 `[R, entries]` on their device; 0 where a row holds none.

        A block is `[B, K, D]`, position by position. There is at least one entry.
        """
        array = self.address_array()
        return self._addresses.get(None, [array], lambda: torch.from_numpy(array).to(self.device))

    def address_array(self) -> NDArray[np.int64]:
        """The same on the host: an array that is not written into, and the same one while the blocks are the same."""
        held = [row.blocks for row in self.places.rows]
        return self._array.get(len(held), list(held), lambda: self._address_array(held))

    def _address_array(self, held: Sequence[tuple[KVBlock | None, ...]]) -> NDArray[np.int64]:
        size = BLOCK_TOKENS * self.heads * self.width * self.dtype.itemsize
        bases: dict[int, int] = {}
        table = np.zeros((len(held), max(1, *map(len, held))), dtype=np.int64)
        for r, blocks in enumerate(held):
            for i, block in enumerate(blocks):
                if block is not None:
                    slab = cast(SlabBlock, block).slab
                    base = bases.get(id(slab))
                    if base is None:
                        base = bases[id(slab)] = slab.buffers[self.buffer].data_ptr()
                    table[r, i] = base + cast(SlabBlock, block).index * size
        return table

    def prepare_write(self, starts: Tensor, counts: Tensor) -> None:
        """Note that `counts[r]` positions of row r from `starts[r]` on are written next, and clear discarded numbers
        after them."""
        _, stale = self.places.positions(starts.tolist(), counts.tolist())
        clear(self.buffer, stale)

    def read(self, rows: Sequence[int], spans: Sequence[range], count: int) -> Tensor:
        """Of each of these rows its own span of blocks, and zeros after them, `[n, K, count * B, D]`.

        Where they follow each other in memory it is a view.
        """
        found = self.places.blocks(tuple(rows), tuple(spans), count) if count else []
        if not found:
            shape = (len(rows), self.heads, count * BLOCK_TOKENS, self.width)
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        whole = gather(self.buffer, found)
        return whole.view(len(rows), count * BLOCK_TOKENS, self.heads, self.width).transpose(1, 2)

    def span(self, rows: range, low: int, end: int, tracked: bool = False) -> Tensor:
        if tracked or self.requires_grad:
            return super().span(rows, low, end, tracked)
        blocks = range(low // BLOCK_TOKENS, -(-end // BLOCK_TOKENS))
        begin = blocks.start * BLOCK_TOKENS
        return self.read(rows, [blocks] * len(rows), len(blocks))[:, :, low - begin : end - begin]

    def dense(self) -> Tensor:
        held = [row.blocks for row in self.rows]
        begins = [next((i for i, block in enumerate(row) if block is not None), len(row)) for row in held]
        count = max((len(row) - begin for row, begin in zip(held, begins)), default=0)
        if self.requires_grad or any(begin % count for begin in begins if count):
            return super().dense()
        rings = self.read(range(len(held)), [range(begin, len(row)) for row, begin in zip(held, begins)], count)
        return rings.clone() if torch.is_grad_enabled() else rings

    def write(self, new: Tensor, starts: Tensor, counts: Tensor) -> None:
        spans, width = counts.tolist(), new.shape[1]
        found, stale = self.places.positions(starts.tolist(), spans)
        if self.requires_grad or new.requires_grad:
            super().write(new, starts, counts)
            return
        values = new.flatten(0, 1)
        if any(count != width for count in spans):
            real = chain.from_iterable(range(r * width, r * width + count) for r, count in enumerate(spans))
            values = values.index_select(0, on_device(tuple(real), new.device))
        scatter(self.buffer, found, values)
        # Rows of several lengths are read by whole blocks: a stale NaN would spread to the row.
        clear(self.buffer, stale)


class AddressTable(SlabTable):
    """A table of addresses that are on the device, for kernels of a recorded step: rows and blocks come later."""

    def __init__(self, addresses: Tensor, heads: int, width: int, like: Tensor) -> None:
        """addresses: int64 `[R, entries]`, filled by the time that a kernel reads them."""
        super().__init__(SlabRows([]), 0, np.zeros(addresses.shape, dtype=np.int64), heads, width, like)
        self._given = addresses

    def addresses(self) -> Tensor:
        return self._given

    def prepare_write(self, starts: Tensor, counts: Tensor) -> None:
        """Nothing: `SlabTable.prepare_write` of the tables whose addresses are given, before the step runs."""

    def read(self, rows: Sequence[int], spans: Sequence[range], count: int) -> Tensor:
        raise RuntimeError("the reference of an operation reads blocks, which are not known while a step is recorded")

    def span(self, rows: range, low: int, end: int, tracked: bool = False) -> Tensor:
        return self.read([], [], 0)

    def dense(self) -> Tensor:
        return self.read([], [], 0)

    def write(self, new: Tensor, starts: Tensor, counts: Tensor) -> None:
        self.read([], [], 0)

    def write_back(self, rings: Tensor, starts: Tensor, counts: Tensor, least: int = 1) -> None:
        self.read([], [], 0)
