"""Numbers of blocks: every rank holds its part of a block of positions, and all of them know it by one number.

Rank 0 and the others share, copy and let go of blocks at the same calls, so a snapshot needs the numbers of its blocks
alone. Rank 0 gives a block its number when the first snapshot holds it. When rank 0 lets go of the block, so do they.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any
from weakref import ref

from lmstate.ops.types.block_table import KVBlock, RowBlocks
from lmstate.state.blocks import Buffer, CapturedBlocks


class BlockNumbers:
    """The numbers of the blocks of rank 0 that snapshots hold. For one thread at a time."""

    def __init__(self) -> None:
        self._numbers: dict[ref[KVBlock], int] = {}
        self._next = count()
        # A block may end in any thread, in the middle of anything: its callback runs no line of Python.
        self._ended: deque[ref[KVBlock]] = deque()

    def of(self, block: KVBlock) -> int:
        number = self._numbers.get(ref(block))
        if number is None:
            number = self._numbers[ref(block, self._ended.append)] = next(self._next)
        return number

    def ended(self) -> list[int]:
        """The numbers of the blocks that ended since this was last asked."""
        return [self._numbers.pop(self._ended.popleft()) for _ in range(len(self._ended))]


class HeldBlocks:
    """The parts that another rank holds of numbered blocks."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[KVBlock, Mapping[str, Buffer]]] = {}

    def hold(self, numbers: Sequence[int], pieces: Sequence[CapturedBlocks]) -> None:
        """Hold the blocks of these pieces, one after the other, under these numbers."""
        blocks = [(block, piece.buffers) for piece in pieces for block in piece.blocks()]
        self._blocks.update(zip(numbers, blocks, strict=True))

    def let_go(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self._blocks[number]

    def piece(self, told: Sequence[Any]) -> CapturedBlocks:
        """The part of the positions that `RankBlocks.told` described."""
        start, stop, low, unfinished, numbers = told
        held = [None if number is None else self._blocks[number] for number in numbers]
        buffers = next(each for each in held if each is not None)[1]
        row = RowBlocks(tuple(each and each[0] for each in held), len(held), low)
        return CapturedBlocks(buffers, row, start, stop, unfinished)
