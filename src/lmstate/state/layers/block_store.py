"""The positions of every row in blocks that rows, forks, marks and snapshots share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmstate.ops.types.block_table import BLOCK_TOKENS, BlockTable, KVBlock, RowBlocks
from lmstate.ops.types.slab_table import SlabRows, SlabTable
from lmstate.state.blocks import BlockPool, BlockSpec, Buffer, CapturedBlocks
from lmstate.state.changes import Changes
from lmstate.state.layers.base import Layout
from lmstate.state.step import Step

FIRST_ENTRIES = 8
"""Of a row of the table, to begin with."""


class BlockStore:
    """Buffers `[R, *heads, S, D]` in blocks of `BLOCK_TOKENS` positions: position p of a row is in its block p // B.

    A step writes after what is committed, so that to discard it is to give its blocks back. It never writes into a
    block that another one may hold: `reserve` gives the row a copy first. A window gives up the blocks in front of its
    span.
    """

    def __init__(self, layout: Layout, buffers: Mapping[str, Buffer], window_span: int | None, pool: BlockPool) -> None:
        self.layout, self.buffers, self.window_span, self.pool = layout, dict(buffers), window_span, pool
        self.rows = [RowBlocks()] * layout.rows
        self.spec = BlockSpec(buffers)
        self.tables: dict[str, BlockTable] = {}
        """Empty where they are to be made again, by the next step."""
        self._undo: dict[int, tuple[RowBlocks, RowBlocks]] = {}
        """The rows that got blocks for the step at hand: before and after."""
        self._constants: list[KVBlock] = []
        """Blocks that the step at hand writes into, whose content no gradient follows yet."""
        self.views: list[Any] = []
        """Made of the tables by layers, and cleared with them; several stores may share the list."""

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockStore:
        self._share(range(len(self.rows)))
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(
            vars(self),
            rows=list(self.rows),
            tables={},
            _undo={},
            _constants=[],
            views=memo.setdefault(id(self.views), []),
        )
        return twin

    # ---- the step

    def reserve(self, step: Step) -> None:
        rows = self.rows
        if torch.is_grad_enabled():
            # Autograd would take what is committed in a block for a part of what a discarded step wrote after it.
            begun = {r: rows[r].blocks[start // BLOCK_TOKENS] for r, start, _ in step.spans if start % BLOCK_TOKENS}
            held = [(r, block) for r, block in begun.items() if block is not None]
            self._share([r for r, block in held if step.speculative or block.requires_grad()])
            self._constants = [block for _, block in held if not block.requires_grad()]
        short = [
            (r, start, end)
            for r, start, end in step.spans
            if end > len(rows[r].blocks) * BLOCK_TOKENS or start < rows[r].shared * BLOCK_TOKENS
        ]
        if short:
            self._make_room(short)

    def commit(self, step: Step, accepted: Sequence[int], changes: Changes) -> None:
        if self._undo:
            changes.assign(self, "_undo", {})
        if self._constants:
            changes.assign(self, "_constants", [])
        if self.window_span is None:
            return
        for r, (row, start, n) in enumerate(zip(self.rows, step.starts, accepted)):
            low = start + n - self.window_span
            if n and low // BLOCK_TOKENS > row.low // BLOCK_TOKENS:
                changes.put(self.rows, r, _from(row, low))
                self._forget()

    def discard(self) -> None:
        """Give back the blocks that the step was given. The step wrote only after the committed positions."""
        self._forget()
        for r, (before, after) in self._undo.items():
            if self.rows[r] is after:  # else its blocks were shared since
                self._point(r, before, 0)  # first: whatever interrupts it, the next discard does it again
                self.rows[r] = before
        self._undo = {}
        if any(block.requires_grad() for block in self._constants):
            for block in self._constants:
                block.forget_graph()
            self.views.clear()
            self.tables = {}
        self._constants = []

    def table(self, name: str) -> BlockTable:
        """A buffer as operations read and write it in the step at hand."""
        return (self.tables or self._tabled())[name]

    # ---- moving about

    def earliest_rewind(self, row: int) -> int:
        low = self.rows[row].low
        return 0 if self.window_span is None or not low else low + self.window_span - self.layout.rewind

    def rewind(self, row: int, to: int, changes: Changes) -> None:
        own, count = self.rows[row], -(-to // BLOCK_TOKENS)
        if count < len(own.blocks):
            changes.put(self.rows, row, own._replace(blocks=own.blocks[:count], shared=min(own.shared, count)))
            self._forget()

    def select(self, sources: Sequence[int | None], changes: Changes) -> None:
        self._share([source for source in set(sources) if source is not None and sources.count(source) > 1])
        rows = [RowBlocks() if source is None else self.rows[source] for source in sources]
        changes.assign(self, "rows", rows)
        self._outdate(changes)

    def add_row(self, length: int, stored: Mapping[str, Tensor], changes: Changes) -> None:
        changes.assign(self, "rows", [*self.rows, self._restored(length, stored)])
        self._outdate(changes)

    def capture(self, row: int, length: int, unfinished: Mapping[str, int] | None = None) -> CapturedBlocks:
        self._share([row])
        own, count = self.rows[row], -(-length // BLOCK_TOKENS)
        start = own.low if self.window_span is None else max(own.low, length - self.window_span, 0)
        return CapturedBlocks(self.buffers, RowBlocks(own.blocks[:count], count, own.low), start, length, unfinished)

    def restore(self, row: int, length: int, stored: Mapping[str, Tensor], changes: Changes) -> None:
        """`stored`: what `capture` gave, here or in a state of the same buffers, or tensors `[*heads, n, D]` of the
        last n positions."""
        changes.put(self.rows, row, self._restored(length, stored))
        self._outdate(changes)

    def _restored(self, length: int, stored: Mapping[str, Tensor]) -> RowBlocks:
        if isinstance(stored, CapturedBlocks) and stored.buffers == self.buffers:
            low = max(stored.row.low, 0 if self.window_span is None else length - self.window_span)
            return _from(RowBlocks(stored.row.blocks, len(stored.row.blocks), stored.row.low), low)
        return self._written(RowBlocks(), length, stored) if stored and length else RowBlocks()

    def in_blocks(self, start: int, stored: Mapping[str, Tensor]) -> CapturedBlocks:
        """Tensors `[*heads, n, D]` of the positions from `start` on in blocks of their own, as a row's are captured."""
        blocks = [None] * (start // BLOCK_TOKENS) + self.spec.written(self.pool, start, stored)
        stop = start + next(iter(stored.values())).shape[-2]
        return CapturedBlocks(self.buffers, RowBlocks(tuple(blocks), len(blocks), start), start, stop)

    def later(self, row: int, length: int, start: int) -> Mapping[str, Tensor]:
        """The positions from `start` on of a row that has lost none, those that its window has passed too."""
        return CapturedBlocks(self.buffers, self.rows[row], start, length)

    def drop(self, row: int, length: int, start: int, stop: int, moved: Mapping[str, Tensor], changes: Changes) -> None:
        """Have `moved`, of the positions from `stop` on, follow those before `start`."""
        own, first = self.rows[row], start // BLOCK_TOKENS
        captured = CapturedBlocks(self.buffers, own, first * BLOCK_TOKENS, start)
        joined = {name: torch.cat([captured[name], moved[name]], dim=-2) for name in self.buffers}
        kept = RowBlocks(own.blocks[:first], min(own.shared, first), own.low)
        changes.put(self.rows, row, self._written(kept, length - stop + start, joined))
        self._outdate(changes)

    def has_lost(self, row: int) -> bool:
        """Whether positions of the row were given up."""
        return self.rows[row].low > 0

    def tensors(self) -> list[Tensor]:
        """Of every block of every row, once."""
        blocks = {id(block): block for row in self.rows for block in row.blocks if block is not None}
        return [tensor for block in blocks.values() for tensor in block.tensors]

    def nbytes(self) -> int:
        blocks = {id(block) for row in self.rows for block in row.blocks}
        return self.spec.nbytes * len(blocks - {id(None)})

    def nbytes_shared(self) -> int:
        """Bytes of the blocks that other rows, marks or snapshots may hold too."""
        blocks = {id(block) for row in self.rows for block in row.blocks[: row.shared]}
        return self.spec.nbytes * len(blocks - {id(None)})

    # ---- blocks

    def _make_room(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Blocks of their own for the rows that write the positions `start..end`: all, or none of them."""
        wanted = []  # row, its first block that is written, and where the blocks end
        for r, start, end in spans:
            wanted.append((r, start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)))
        need = sum(
            last - (first if self.rows[r].shared > first else min(len(self.rows[r].blocks), last))
            for r, first, last in wanted
        )
        with self.pool.lock:
            self.pool.require(need * self.spec.nbytes)
            fresh = iter(self.pool.allocate(self.spec, need))
            for (r, first, last), (_, start, _) in zip(wanted, spans):
                row = self.rows[r]
                known = first if row.shared > first else len(row.blocks)  # what others hold stays theirs
                own = [*row.blocks[:known], *islice(fresh, max(last - known, 0))]
                if known < len(row.blocks) and start % BLOCK_TOKENS:  # of what they and this row have in part, a copy
                    _copy(row.blocks[first], own[first])
                after = RowBlocks(tuple(own), min(row.shared, first), row.low)
                self._undo[r], self.rows[r] = (self._undo.get(r, (row,))[0], after), after
                self._point(r, after, known)

    def _written(self, before: RowBlocks, length: int, stored: Mapping[str, Tensor]) -> RowBlocks:
        """Blocks of a row of `length` that hold the last positions, after those that it has."""
        tensors = {name: stored[name] for name in self.buffers}  # what is captured in blocks is put together once
        start = length - next(iter(tensors.values())).shape[-2]
        blocks = [*before.blocks, *[None] * (start // BLOCK_TOKENS - len(before.blocks))]
        blocks += self.spec.written(self.pool, start, tensors)
        return RowBlocks(tuple(blocks), before.shared, before.low if before.blocks else start)

    def _share(self, rows: Sequence[int]) -> None:
        """From here on others may hold the blocks of these rows: nothing else changes, and nothing has to be undone."""
        for r in rows:
            self.rows[r] = self.rows[r]._replace(shared=len(self.rows[r].blocks))

    # ---- tables

    def _tabled(self) -> dict[str, BlockTable]:
        most = max([FIRST_ENTRIES, *(len(row.blocks) for row in self.rows)])
        entries = FIRST_ENTRIES
        while entries < most:
            entries *= 2
        pointers = np.zeros((len(self.buffers), len(self.rows), entries), dtype=np.int64)
        if self.spec.slabs is None:
            for r, row in enumerate(self.rows):
                _write_pointers(pointers, r, row, 0)
        self.views.clear()
        self._pointers = pointers
        # At last, so that an interrupt leaves no tables with invalid pointers.
        table: Callable[..., BlockTable] = partial(BlockTable, self.rows)
        if self.spec.slabs is not None:
            table = partial(SlabTable, SlabRows(self.rows))
        self.tables = {
            name: table(i, pointers[i], buffer.heads[0] if buffer.heads else 1, buffer.width, buffer.zeros(0))
            for i, (name, buffer) in enumerate(self.buffers.items())
        }
        return self.tables

    def _point(self, row: int, own: RowBlocks, first: int) -> None:
        """Write where a row's blocks are into the tables, from one on; where they do not suffice, give them up."""
        if not self.tables or len(own.blocks) > self._pointers.shape[2]:
            self.views.clear()  # before the tables that they were made of
            self.tables = {}
            return
        if self.spec.slabs is None:
            _write_pointers(self._pointers, row, own, first)

    def _forget(self) -> None:
        """Have no table hold blocks that rows gave up."""
        for table in self.tables.values():
            table.forget()

    def _outdate(self, changes: Changes) -> None:
        changes.assign(self, "tables", {})
        changes.clear(self.views)


def _copy(block: KVBlock | None, into: KVBlock | None) -> None:
    assert block is not None and into is not None, "a row writes behind what its window has left behind"
    for own, other in zip(into.tensors, block.tensors):
        own.copy_(other)
    into.filled = block.filled


def _write_pointers(pointers: NDArray[np.int64], row: int, own: RowBlocks, first: int) -> None:
    """Write where the blocks of a row are, from one on, into pointers int64 `[buffers, R, blocks]`."""
    for i in range(first, len(own.blocks)):
        if (block := own.blocks[i]) is not None:
            pointers[:, row, i] = block.pointers


def _from(row: RowBlocks, low: int) -> RowBlocks:
    """The row without the blocks that are before position `low`."""
    first = max(low, 0) // BLOCK_TOKENS
    if low <= row.low:
        return row
    return RowBlocks((None,) * first + row.blocks[first:], row.shared, max(row.low, first * BLOCK_TOKENS))
