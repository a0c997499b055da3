"""Sliding and chunked layers of the cache: a window of keys and values that moves to fresh memory now and then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from lmstate.integrations.transformers.cache.layers.base import (
    RewindableLayer,
    Tensors,
    check_fit,
    check_new,
    check_pair,
    chosen,
    joined,
    last,
    repeated,
    storage_bytes,
    whole,
)
from lmstate.integrations.transformers.cache.layers.growable import GrowableTensor


class WindowLayer(DynamicSlidingWindowLayer, RewindableLayer):
    """The last keys `[R, K, n, D]` and values of a sliding or chunked layer, n >= what the next query may see.

    Memory holds the window, `rewind` tokens before it, and slack. When the slack is used up, what is still needed moves
    to the front of fresh memory, once every `slack` tokens; so a token costs the same however long the text. While the
    past is recorded (assisted decoding), all since the last `crop` stays.
    """

    kind = "window"
    keys: Any
    values: Any

    def __init__(self, sliding_window: int, rewind: int = 16) -> None:
        super().__init__(sliding_window=sliding_window)
        self.past = sliding_window - 1  # as many earlier tokens may be seen
        self.rewind = rewind
        self._k, self._v = GrowableTensor(), GrowableTensor()
        self._held: tuple[Tensor, Tensor] | None = None  # views: all that is stored
        self._cropped_to = 0  # length at the last crop: recording keeps all that came after

    @property
    def slack(self) -> int:
        return max(64, self.sliding_window // 4)

    def activate_past_recording(self) -> None:
        if not self.record_past:
            self._cropped_to = self.cumulative_length
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
        check_new((k, v), (key_states, value_states))
        seen = min(self.cumulative_length, self.past)  # of the past, by the first new query
        keep = self.past + max(self.rewind, self.cumulative_length - self._cropped_to if self.record_past else 0)
        full = keep + self.slack
        self.cumulative_length += new
        if new > full and not self.record_past:  # a long prompt: most of it is never needed again
            keys, values = (joined(held, seen, fresh) for held, fresh in ((k, key_states), (v, value_states)))
            self._k.drop()
            self._v.drop()
            self._hold(self._k.extend(None, last(keys, keep)), self._v.extend(None, last(values, keep)))
            return keys, values
        if k.shape[-2] + new > full:  # what no later query needs is left behind: fresh memory, old views stay whole
            stored = min(k.shape[-2], keep)
            k, v = self._k.last(k, stored), self._v.last(v, stored)
        need = k.shape[-2] + new
        slots = min(max(2 * k.shape[-2], need), max(full, need))
        self._hold(self._k.extend(k, key_states, slots), self._v.extend(v, value_states, slots))
        k, v = self._stored()
        return last(k, seen + new), last(v, seen + new)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove")
        WindowLayer.cut(self, self.cumulative_length, max(0, self.cumulative_length + tokens_to_remove))
        self._cropped_to = self.cumulative_length

    def reset(self) -> None:
        self.keys = self.values = self._held = None
        self.is_initialized = False
        self.cumulative_length = self._cropped_to = 0
        self._k.drop()
        self._v.drop()

    def offload(self) -> None:
        self._move("cpu")

    def prefetch(self) -> None:
        if self.is_initialized and self.keys.device != self.device:
            self._move(self.device)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(repeated(self.rows(), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(chosen(indices, self.rows() or 0))

    # ---- RewindableLayer

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
        if tensors and self.is_initialized:
            check_fit(self.kind, tensors, self._stored())

    def put(self, length: int, tensors: Tensors) -> None:
        WindowLayer.reset(self)
        if tensors:
            WindowLayer.lazy_initialization(self, tensors["k"], tensors["v"])
            self._hold(self._k.extend(None, tensors["k"]), self._v.extend(None, tensors["v"]))
            self.cumulative_length = self._cropped_to = length

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

    def _move(self, device: torch.device | str) -> None:
        """All that is stored, what only a rewind needs too, to another device; the room stays behind."""
        if self.is_initialized:
            k, v = self._stored()
            self._k.drop()
            self._v.drop()
            self._hold(k.to(device, non_blocking=True), v.to(device, non_blocking=True))
