"""Positions of a row whose blocks are on several ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmstate.distributed.cuts import LayerCut
from lmstate.distributed.ranks import Ranks
from lmstate.ops.types.block_table import RowBlocks
from lmstate.state.blocks import CapturedBlocks


class RankBlocks(CapturedBlocks):
    """Positions of a row, as rank 0 has them: its own part of the blocks. A tensor that is read has the heads of all.

    It lives as long as the ranks do: then it raises `RanksError` where it is read.
    """

    def __init__(self, own: CapturedBlocks, ranks: Ranks, cut: LayerCut) -> None:
        """`cut`: of the layer; its kv heads, where it has blocks."""
        super().__init__(own.buffers, own.row, own.start, own.stop, own.unfinished)
        assert isinstance(cut, tuple)
        self.ranks, self.heads = ranks, cut

    @property
    def own(self) -> CapturedBlocks:
        """The part of rank 0."""
        return super().like(self.row, self.start, self.stop)

    def like(self, row: RowBlocks, start: int, stop: int) -> CapturedBlocks:
        return RankBlocks(super().like(row, start, stop), self.ranks, self.heads)

    @property
    def nbytes(self) -> int:
        return super().nbytes * sum(self.heads) // self.heads[0] if self.heads else super().nbytes

    def told(self) -> tuple[Any, ...]:
        """Positions and numbers, by which the others find their parts. Inside `turn`."""
        numbers = [None if block is None else self.ranks.blocks.of(block) for block in self.row.blocks]
        return self.start, self.stop, self.row.low, self.unfinished, numbers

    def __getitem__(self, name: str) -> Tensor:
        if not self.heads:
            return super().__getitem__(name)
        with self.ranks.turn():
            own = super().__getitem__(name)
            self.ranks.tell("read", self.told(), name, self.heads)
            with self.ranks.together():
                return self.ranks.group.gather(own, self.heads, dim=0)

    def follow(self, before: CapturedBlocks) -> None:
        assert isinstance(before, RankBlocks)
        with self.ranks.turn():
            super().follow(before)
            self.ranks.tell("follow_piece", self.told(), before.told())
