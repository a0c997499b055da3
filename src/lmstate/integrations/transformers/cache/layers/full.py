"""Attention layers of the cache whose keys and values only grow.

These and those of window.py are not `lmstate.state.AttentionState`. transformers takes keys back from the cache, in the
order of their positions and with none missing, and builds its mask for that order. A ring would have to be unrolled, by
a copy, at every token. So keys are a tensor in order here, with room after it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from lmstate.errors import SnapshotError
from lmstate.integrations.transformers.cache.layers.base import (
    RewindableLayer,
    Tensors,
    check_fit,
    check_new,
    check_pair,
    chosen,
    repeated,
    storage_bytes,
    whole,
)
from lmstate.integrations.transformers.cache.layers.growable import GrowableTensor


class FullAttentionLayer(DynamicLayer, RewindableLayer):
    """All keys `[R, K, n, D]` and values `[R, K, n, Dv]`, as views of memory that doubles when it is full."""

    kind = "full"
    keys: Any  # a Tensor once there are tokens; transformers calls it optional
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self._k, self._v = GrowableTensor(), GrowableTensor()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; all that are stored. The views are valid until tokens go or rows are reordered."""
        if not self.is_initialized:
            FullAttentionLayer.lazy_initialization(self, key_states, value_states)
        check_new((self.keys, self.values), (key_states, value_states))
        self.keys = self._k.extend(self.keys, key_states)
        self.values = self._v.extend(self.values, value_states)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove")
        if self.is_initialized:
            length = self.keys.shape[-2]
            FullAttentionLayer.cut(self, length, max(0, length + tokens_to_remove))

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self._k.drop()
        self._v.drop()

    def offload(self) -> None:
        super().offload()
        self._k.drop()
        self._v.drop()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(repeated(self.rows(), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(chosen(indices, self.rows() or 0))

    # ---- RewindableLayer

    def reach(self, length: int) -> int:
        return 0

    def cut(self, length: int, to: int) -> None:
        if self.is_initialized:
            stored = to - length + self.keys.shape[-2]
            self.keys, self.values = self._k.cut(self.keys, stored), self._v.cut(self.values, stored)

    def select(self, rows: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self._k.select(self.keys, rows), self._v.select(self.values, rows)

    def rows(self) -> int | None:
        return self.keys.shape[0] if self.is_initialized else None

    def capture(self) -> Tensors:
        return {"k": whole(self.keys), "v": whole(self.values)} if self.is_initialized else {}

    def check(self, length: int, tensors: Tensors) -> None:
        check_pair(self.kind, tensors, length, length)
        if tensors and self.is_initialized:
            check_fit(self.kind, tensors, (self.keys, self.values))

    def put(self, length: int, tensors: Tensors) -> None:
        FullAttentionLayer.reset(self)
        if tensors:
            k, v = tensors["k"], tensors["v"]
            self.dtype, self.device, self.is_initialized = k.dtype, k.device, True
            self.keys, self.values = self._k.extend(None, k), self._v.extend(None, v)

    def nbytes(self) -> int:
        held = [*(room.slots for room in (self._k, self._v)), self.keys, self.values]
        return storage_bytes(held)


class IndexedLayer(FullAttentionLayer, DynamicIndexedLayer):
    """Full attention, with the keys `[R, n, D]` of an indexer that chooses what to attend to (DeepSeek)."""

    kind = "indexed"
    indexer_keys: Any
    indexer_position_ids: Any

    def __init__(self) -> None:
        super().__init__()
        self._i = GrowableTensor()
        self._forget_indexer()

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if not self.is_indexer_initialized:
            self.indexer_dtype, self.indexer_device = indexer_key_states.dtype, indexer_key_states.device
            self.is_indexer_initialized = True
        self.indexer_keys = self._i.extend(self.indexer_keys, indexer_key_states)
        return self.indexer_keys

    def crop(self, tokens_to_remove: int) -> None:
        FullAttentionLayer.crop(self, 0)  # refuses what is positive
        if self.is_initialized:
            length = self.keys.shape[-2]
            self.cut(length, max(0, length + tokens_to_remove))

    def offload(self) -> None:
        super().offload()
        self._i.drop()

    def reset(self) -> None:
        super().reset()
        self._forget_indexer()

    def _forget_indexer(self) -> None:
        self.indexer_keys = self.indexer_position_ids = None
        self.is_indexer_initialized = False
        self._i.drop()

    def cut(self, length: int, to: int) -> None:
        super().cut(length, to)
        # Its own tokens are counted: a call that failed may have stored keys of the indexer alone.
        if self.indexer_keys is not None:
            self.indexer_keys = self._i.cut(self.indexer_keys, min(to, self.indexer_keys.shape[-2]))
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :to]

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.indexer_keys is not None:
            self.indexer_keys = self._i.select(self.indexer_keys, rows)
        if self.indexer_position_ids is not None:
            positions = self.indexer_position_ids
            self.indexer_position_ids = positions.index_select(1, rows.to(positions.device))

    def capture(self) -> Tensors:
        tensors = super().capture()
        if self.indexer_keys is not None:
            tensors["indexer_keys"] = whole(self.indexer_keys)
        if self.indexer_position_ids is not None:
            tensors["indexer_position_ids"] = whole(self.indexer_position_ids)
        return tensors

    def check(self, length: int, tensors: Tensors) -> None:
        super().check(length, {name: tensor for name, tensor in tensors.items() if not name.startswith("indexer_")})
        if not set(tensors) <= {"k", "v", "indexer_keys", "indexer_position_ids"}:
            raise SnapshotError(f"an indexed layer does not hold all of {sorted(tensors)}")

    def put(self, length: int, tensors: Tensors) -> None:
        rest = dict(tensors)
        keys, positions = rest.pop("indexer_keys", None), rest.pop("indexer_position_ids", None)
        super().put(length, rest)
        self._forget_indexer()
        if keys is not None:
            self.update_indexer(keys)
        self.indexer_position_ids = positions


class BlockIndexedLayer(IndexedLayer):
    """Full attention, with the keys `[R, H, n, D]` of an indexer that scores blocks of positions (MiniMax M3)."""

    kind = "block-indexed"

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Store new keys of the indexer; all that are stored."""
        return self.update_indexer(idx_k)
