"""The state of a layer that attends to what another one stored (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lmstate import ops
from lmstate.errors import SnapshotError
from lmstate.state.changes import Changes
from lmstate.state.layers.attention import KeyValueState
from lmstate.state.layers.base import TokenlessState
from lmstate.state.step import Step


class SharedState(TokenlessState, KeyValueState):
    """Nothing of its own. `source` is an earlier layer's: it stores a step's tokens before this one reads them, and all
    that moves, forgets or saves them happens there."""

    kind = "shared"
    lossy = False

    def __init__(self, source: KeyValueState):
        self.source = source

    def view(self, step: Step) -> ops.KVView | None:
        return self.source.view(step)

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        params: ops.AttentionParams,
        rotation: ops.RopeTables | None = None,
    ) -> Tensor:
        assert new is None, "a layer that shares another one's memory stores nothing"
        return self.source.attend(q, None, step, params, rotation)

    def attend_stored(self, q: Tensor, step: Step, params: ops.AttentionParams, mask: ops.CausalMask) -> Tensor:
        return self.source.attend_stored(q, step, params, mask)

    def kept(self, row: int, length: int) -> list[list[int]]:
        return self.source.kept(row, length)

    def select(self, rows: Sequence[int | None], changes: Changes) -> None:
        pass

    def add_row(self, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        self._check(tensors)

    def capture(self, row: int, length: int) -> Mapping[str, Tensor]:
        return {}

    def restore(self, row: int, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        self._check(tensors)

    @staticmethod
    def _check(tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            raise SnapshotError(f"the snapshot has {sorted(tensors)} for a layer that shares another one's memory")

    def tensors(self) -> list[Tensor]:
        return []
