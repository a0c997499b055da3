"""The state of an attention layer: keys and values, full or of a sliding window."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import UnsupportedError
from lmstate.state.layers.base import LayerState, Layout
from lmstate.state.layers.slots import SlotState
from lmstate.state.step import Step


class KeyValueState(LayerState):
    """The state of a layer that attends to keys and values, however it stores them and whatever it forgets."""

    def view(self, step: Step) -> ops.KVView | None:
        """The keys and values themselves, where a step may store and read them as `ops.Run` does."""
        return None

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        params: ops.AttentionParams,
        rotation: ops.RopeTables | None = None,
    ) -> Tensor:
        """Store new keys `[R, T, K, D]` and values `[R, T, K, Dv]`, then attend: q `[R, T, H, D]` -> float32
        `[R, T, H, Dv]`.

        `rotation` turns queries and new keys first. No new ones: attends to what is stored, for layers that share this
        one's memory.
        """

    def attend_stored(self, q: Tensor, step: Step, params: ops.AttentionParams, mask: ops.CausalMask) -> Tensor:
        """Attend to what is stored under another mask than the layer's own: q `[R, T, H, D]` -> `[R, T, H, Dv]`.

        Of the positions before the reserved step it reaches as many as the layer's own mask does from the first one.
        """
        raise UnsupportedError(f"a {self.kind} layer of this kind attends under its own mask alone")


class AttentionState(SlotState, KeyValueState):
    """Keys `[R, K, S, D]` and values `[R, K, S, Dv]`; of a window, the positions that a rewind brings in sight too."""

    what = "keys and values"

    def __init__(
        self,
        layout: Layout,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        mask: ops.CausalMask = ops.FULL_CAUSAL,
        rotate_by: Callable[[Tensor, int], Tensor] | None = None,
    ):
        """`mask`: the mask of a query, and so the positions that are stored.

        `rotate_by(keys [K, S, D], delta)` rotates keys as if each had stood `delta` positions farther on (None: keys
        have no position); `State.drop` closes a gap with it.
        """
        self.mask, self.rotate_by = mask, rotate_by
        # The positions in sight, and as many as a rewind brings in sight.
        window_span = None if mask.span is None else mask.span - 1 + layout.rewind
        self.kind = "attention" if window_span is None else "window"
        widths, dtypes = self.stored_as(kv_heads, {"k": head_dim, "v": value_dim or head_dim})
        super().__init__(layout, widths, window_span, dtypes)

    def stored_as(
        self, kv_heads: int, dims: dict[str, int]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
        """The buffers that hold keys and values of these widths, without rows and slots, and the dtypes of some."""
        return {name: (kv_heads, dim) for name, dim in dims.items()}, {}

    def view(self, step: Step) -> ops.KVView | None:
        if not self.view_cache:
            self.view_cache.append(self.new_view())
        return self.view_cache[0]

    def new_view(self) -> ops.KVView:
        return ops.KVView(self.stored("k"), self.stored("v"), self.mask)

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        params: ops.AttentionParams,
        rotation: ops.RopeTables | None = None,
    ) -> Tensor:
        k, v, spans = self.stored("k"), self.stored("v"), (step.starts_t, step.counts_t)
        if new is not None and rotation is not None:
            return ops.rotate_attend(q, *new, rotation, k, v, *spans, params, self.mask)
        if rotation is not None:
            q = ops.rope(q, *rotation)
        if new is not None:
            ops.append(*new, k, v, *spans)
        return ops.attend(q, k, v, *spans, params, self.mask)

    def attend_stored(self, q: Tensor, step: Step, params: ops.AttentionParams, mask: ops.CausalMask) -> Tensor:
        return ops.attend(q, self.stored("k"), self.stored("v"), step.starts_t, step.counts_t, params, mask)

    def lowest(self, position: int) -> int:
        return self.mask.first_visible(position)

    def refuses_drop(self, row: int) -> str | None:
        return "its chunks begin at fixed positions" if self.mask.chunk is not None else super().refuses_drop(row)

    def moved(self, name: str, stored: Tensor, delta: int) -> Tensor:
        return stored if name != "k" or self.rotate_by is None else self.rotate_by(stored, delta).to(stored)
