"""The state of a layer that attends to an encoded source: its keys and values, which no token changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lmstate import ops
from lmstate.errors import SnapshotError, UnsupportedError
from lmstate.state.blocks import CapturedBlocks
from lmstate.state.changes import Changes
from lmstate.state.layers.base import LayerState, Layout, TokenlessState
from lmstate.state.layers.block_store import BlockStore
from lmstate.state.layers.slots import SlotState
from lmstate.state.step import Step, integers


class CrossState(TokenlessState, SlotState):
    """Keys and values `[R, K, S, D]` of each row's source, S as long as it is. Forks and snapshots share the blocks.

    `State.condition` puts them in a row by `restore`; tokens come and go, and they stay.
    """

    kind = "cross"
    what = "keys and values of a source"
    conditioned = True

    def __init__(self, layout: Layout, kv_heads: int, head_dim: int):
        if layout.static:
            raise UnsupportedError(
                "static=True was asked for; the sources of this model have any length, and a static state keeps its "
                "tensors: leave static out"
            )
        super().__init__(layout, dict.fromkeys(("k", "v"), (kv_heads, head_dim)), None)
        self.lengths = [0] * layout.rows

    @property
    def store(self) -> BlockStore:
        assert isinstance(self.content, BlockStore)
        return self.content

    def attend(self, q: Tensor, step: Step, params: ops.AttentionParams) -> Tensor:
        """Queries `[R, T, H, D]` over all of their row's source -> float32 `[R, T, H, D]`."""
        return ops.attend_whole(q, self.stored("k"), self.stored("v"), integers(self.lengths), step.counts_t, params)

    def keys(self, row: int) -> Tensor:
        """Those of a row's source, `[K, S, D]`."""
        stored, length = self.stored("k"), self.lengths[row]
        return stored[row, :, :length] if isinstance(stored, Tensor) else stored.span(range(row, row + 1), 0, length)[0]

    def forget_tokens(self, row: int, changes: Changes) -> None:
        pass

    def kept(self, row: int, length: int) -> list[list[int]]:
        return LayerState.kept(self, row, length)

    # ---- rows

    def select(self, rows: Sequence[int | None], changes: Changes) -> None:
        self.store.select(rows, changes)
        changes.assign(self, "lengths", [0 if row is None else self.lengths[row] for row in rows])

    def add_row(self, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        of_source = self._source_length(tensors)
        self.store.add_row(of_source, tensors, changes)
        changes.assign(self, "lengths", [*self.lengths, of_source])

    def capture(self, row: int, length: int) -> Mapping[str, Tensor]:
        return self.store.capture(row, self.lengths[row]) if self.lengths[row] else {}

    def restore(self, row: int, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        of_source = self._source_length(tensors)
        if length and not of_source:
            raise SnapshotError(f"the snapshot has {length} tokens, and no keys and values of their source")
        self.store.restore(row, of_source, tensors, changes)
        changes.put(self.lengths, row, of_source)

    def _source_length(self, tensors: Mapping[str, Tensor]) -> int:
        """Positions of the source whose keys and values these are; 0 for none. Raises `SnapshotError` for others."""
        if not tensors:
            return 0
        if isinstance(tensors, CapturedBlocks) and tensors.buffers == self.buffers:
            length = tensors.stop
        else:
            self._check_tensors(tensors)
            length = tensors["k"].shape[-2]
        self._check(length, tensors)
        return length
