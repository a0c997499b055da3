"""Attention layers of the cache: keys and values that grow, and those of a sliding window.

Why these are not `lmstate.state.AttentionState`: transformers takes keys back from the cache, in the order of their
positions and with none missing, and builds its mask for that order; a ring would have to be unrolled, by a copy, at
every token. So a window here is a tensor in order with slack behind it, moved to the front once the slack is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from lmstate.errors import SnapshotError
from lmstate.integrations.transformers.room import Room

Tensors = dict[str, Tensor]


class Kept(ABC):
    """What `StateCache` asks of a layer beyond the interface of transformers."""

    kind: str  # names it in a file

    @abstractmethod
    def reach(self, length: int) -> int:
        """The earliest position that `cut` reaches in a layer that holds `length` tokens."""

    @abstractmethod
    def cut(self, length: int, to: int) -> None:
        """Take the layer from `length` tokens back to `to`, `reach <= to <= length`."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Make row i of the new batch a copy of row `rows[i]` (int64) of the old one."""

    @abstractmethod
    def rows(self) -> int | None:
        """Rows of the batch; None before the first token."""

    @abstractmethod
    def capture(self) -> Tensors:
        """Copies of all that the layer needs to go on; empty before the first token."""

    @abstractmethod
    def check(self, length: int, tensors: Tensors) -> None:
        """Raise `SnapshotError` unless `capture` may have given these at `length` tokens. Changes nothing."""

    @abstractmethod
    def put(self, length: int, tensors: Tensors) -> None:
        """Become what `capture` gave at `length` tokens, which `check` has passed."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held, room included."""


class GrowingLayer(DynamicLayer, Kept):
    """All keys `[R, K, n, D]` and values `[R, K, n, Dv]`, as views of memory that doubles when it is full."""

    kind = "full"

    def __init__(self) -> None:
        super().__init__()
        self._k, self._v = Room(), Room()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; all that are stored. The views are valid until tokens are removed."""
        if not self.is_initialized:
            GrowingLayer.lazy_initialization(self, key_states, value_states)
        self.keys = self._k.extend(self.keys, key_states)
        self.values = self._v.extend(self.values, value_states)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove")
        if self.is_initialized:
            length = self.keys.shape[-2]
            GrowingLayer.cut(self, length, max(0, length + tokens_to_remove))

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
        self.select(chosen(indices))

    # ---- Kept

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

    def put(self, length: int, tensors: Tensors) -> None:
        GrowingLayer.reset(self)
        if tensors:
            k, v = tensors["k"], tensors["v"]
            self.dtype, self.device, self.is_initialized = k.dtype, k.device, True
            self.keys, self.values = self._k.extend(None, k), self._v.extend(None, v)

    def nbytes(self) -> int:
        held = [*(room.slots for room in (self._k, self._v)), self.keys, self.values]
        return storage_bytes(held)


class WindowLayer(DynamicSlidingWindowLayer, Kept):
    """The last keys `[R, K, n, D]` and values of a sliding or chunked layer, n >= what the next query may see.

    Memory holds the window, `rewind` tokens before it, and slack. When the slack is used up, what is still needed moves
    to the front of fresh memory, once every `slack` tokens; so a token costs the same however long the text. While the
    past is recorded (assisted decoding), all since the last `crop` stays.
    """

    kind = "window"

    def __init__(self, sliding_window: int, rewind: int = 16) -> None:
        super().__init__(sliding_window=sliding_window)
        self.past = sliding_window - 1  # as many earlier tokens may be seen
        self.rewind = rewind
        self._k, self._v = Room(), Room()
        self._held: tuple[Tensor, Tensor] | None = None  # views: all that is stored
        self._settled = 0  # length at the last crop: recording keeps all that came after

    @property
    def slack(self) -> int:
        return max(64, self.sliding_window // 4)

    def activate_past_recording(self) -> None:
        if not self.record_past:
            self._settled = self.cumulative_length
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)
        self._hold(key_states[..., :0, :], value_states[..., :0, :])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; those that a new query may see, as `get_mask_sizes` announced them."""
        if not self.is_initialized:
            WindowLayer.lazy_initialization(self, key_states, value_states)
        new = key_states.shape[-2]
        k, v = self._stored()
        seen = min(self.cumulative_length, self.past)  # of the past, by the first new query
        keep = self.past + max(self.rewind, self.cumulative_length - self._settled if self.record_past else 0)
        full = keep + self.slack
        self.cumulative_length += new
        if new > full and not self.record_past:  # a long prompt: most of it is never needed again
            keys, values = (joined(held, seen, fresh) for held, fresh in ((k, key_states), (v, value_states)))
            self._k.drop()
            self._v.drop()
            self._hold(self._k.extend(None, last(keys, keep)), self._v.extend(None, last(values, keep)))
            return keys, values
        if k.shape[-2] + new > full:  # what no later query needs is left behind: fresh memory, old views stay whole
            k, v = last(k, keep), last(v, keep)
        self._hold(self._grow(self._k, k, key_states, full), self._grow(self._v, v, value_states, full))
        k, v = self._stored()
        return last(k, seen + new), last(v, seen + new)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove")
        WindowLayer.cut(self, self.cumulative_length, max(0, self.cumulative_length + tokens_to_remove))
        self._settled = self.cumulative_length

    def reset(self) -> None:
        self.keys = self.values = self._held = None
        self.is_initialized = False
        self.cumulative_length = self._settled = 0
        self._k.drop()
        self._v.drop()

    def offload(self) -> None:
        super().offload()
        self._k.drop()
        self._v.drop()
        self._held = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(repeated(self.rows(), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(chosen(indices))

    # ---- Kept

    def reach(self, length: int) -> int:
        if not self.is_initialized:
            return 0
        first = length - self._stored()[0].shape[-2]
        return 0 if first <= 0 else first + self.past

    def cut(self, length: int, to: int) -> None:
        if self.is_initialized:
            k, v = self._stored()
            stored = k.shape[-2] - (length - to)
            self.cumulative_length = to
            self._hold(self._k.cut(k, stored), self._v.cut(v, stored))

    def select(self, rows: Tensor) -> None:
        if self.is_initialized:
            k, v = self._stored()
            self._hold(self._k.select(k, rows), self._v.select(v, rows))

    def rows(self) -> int | None:
        return self._stored()[0].shape[0] if self.is_initialized else None

    def capture(self) -> Tensors:
        if not self.is_initialized:
            return {}
        k, v = self._stored()
        keep = self.past + self.rewind
        return {"k": whole(last(k, keep)), "v": whole(last(v, keep))}

    def check(self, length: int, tensors: Tensors) -> None:
        check_pair(self.kind, tensors, min(length, self.past), length)

    def put(self, length: int, tensors: Tensors) -> None:
        WindowLayer.reset(self)
        if tensors:
            WindowLayer.lazy_initialization(self, tensors["k"], tensors["v"])
            self._hold(self._k.extend(None, tensors["k"]), self._v.extend(None, tensors["v"]))
            self.cumulative_length = self._settled = length

    def nbytes(self) -> int:
        held = [*(room.slots for room in (self._k, self._v)), self.keys, self.values]
        return storage_bytes(held)

    # ---- what is stored

    def _stored(self) -> tuple[Tensor, Tensor]:
        assert self._held is not None or self.keys is not None
        if self._held is None or self.keys is not self._shown[0]:  # someone replaced what the layer shows
            self._hold(self.keys, self.values)
        assert self._held is not None
        return self._held

    def _hold(self, k: Tensor, v: Tensor) -> None:
        self._held = (k, v)
        self.keys, self.values = self._shown = (last(k, self.past), last(v, self.past))

    def _grow(self, room: Room, held: Tensor, new: Tensor, full: int) -> Tensor:
        need = held.shape[-2] + new.shape[-2]
        if room.slots is None or held is not room.view or need > room.slots.shape[-2]:
            if torch.is_grad_enabled() and (new.requires_grad or held.requires_grad):
                return room.extend(held, new)
            slots = room.allocate(new, min(max(2 * held.shape[-2], need), max(full, need)))
            moved = slots.narrow(-2, 0, held.shape[-2])
            moved.copy_(held)
            held = room.view = moved
        return room.extend(held, new)


class IndexedLayer(GrowingLayer, DynamicIndexedLayer):
    """Full attention with the keys `[R, n, D]` of an indexer that chooses what to attend to (DeepSeek sparse attention)."""

    kind = "indexed"

    def __init__(self) -> None:
        super().__init__()
        self.indexer_keys: Tensor | None = None
        self.indexer_position_ids: Tensor | None = None
        self.is_indexer_initialized = False
        self._i = Room()

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if not self.is_indexer_initialized:
            self.indexer_dtype, self.indexer_device = indexer_key_states.dtype, indexer_key_states.device
            self.is_indexer_initialized = True
        self.indexer_keys = self._i.extend(self.indexer_keys, indexer_key_states)
        return self.indexer_keys

    def crop(self, tokens_to_remove: int) -> None:
        GrowingLayer.crop(self, 0)  # refuses what is positive
        if self.is_initialized:
            length = self.keys.shape[-2]
            self.cut(length, max(0, length + tokens_to_remove))

    def reset(self) -> None:
        super().reset()
        self.indexer_keys = self.indexer_position_ids = None
        self.is_indexer_initialized = False
        self._i.drop()

    def cut(self, length: int, to: int) -> None:
        super().cut(length, to)
        if self.indexer_keys is not None:
            self.indexer_keys = self._i.cut(self.indexer_keys, to - length + self.indexer_keys.shape[-2])
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[
                ..., : to - length + self.indexer_position_ids.shape[-1]
            ]

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.indexer_keys is not None:
            self.indexer_keys = self._i.select(self.indexer_keys, rows)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids.index_select(1, rows)

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
        if keys is not None:
            self.update_indexer(keys)
        self.indexer_position_ids = positions


# ---- small things that layers share


def last(x: Tensor, tokens: int) -> Tensor:
    """A view of the last `tokens` of `[..., n, D]`, or of all if there are fewer."""
    return x if tokens >= x.shape[-2] else x.narrow(-2, x.shape[-2] - tokens, tokens)


def joined(held: Tensor, seen: int, new: Tensor) -> Tensor:
    return torch.cat([last(held, seen), new], dim=-2) if seen else new


def whole(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def repeated(rows: int | None, repeats: int) -> Tensor:
    return torch.arange(rows or 0).repeat_interleave(repeats)


def chosen(indices: Tensor) -> Tensor:
    return indices.nonzero().flatten() if indices.dtype == torch.bool else indices


def check_pair(kind: str, tensors: Tensors, least: int, most: int) -> None:
    """Raise `SnapshotError` unless these are keys and values of `least` to `most` tokens, or nothing at all."""
    if not tensors:
        return
    if set(tensors) != {"k", "v"}:
        raise SnapshotError(f"a {kind} layer needs the tensors k and v; the snapshot has {sorted(tensors)}")
    k, v = tensors["k"], tensors["v"]
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or not least <= k.shape[2] <= most:
        raise SnapshotError(
            f"the snapshot has keys {list(k.shape)} and values {list(v.shape)} for a {kind} layer; it needs "
            f"[rows, heads, {least} to {most} tokens, width] of both"
        )


def storage_bytes(tensors: list[Tensor | None]) -> int:
    """Bytes of the memory behind these tensors, each counted once."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(sizes.values())
