"""The state of an attention layer: keys and values, full or of a sliding window."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from lmstate import ops
from lmstate.state.layer import LayerState, Layout
from lmstate.state.slots import SlotState
from lmstate.state.step import Step


class KeyValueState(LayerState):
    """The memory of a layer that attends to keys and values, however it stores them and whatever it forgets."""

    @property
    def rings(self) -> ops.Rings | None:
        """The keys and values themselves, where they lie as `ops.fused_attention` stores and reads them."""
        return None

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        step: Step,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the new keys and values, then attend: q `[R, T, H, D]`, k `[R, T, K, D]`, v -> float32 `[R, T, H, Dv]`.

        Keys come rotated. None for k and v attends to what is stored, for layers that share this one's memory.
        """

    def rotate_attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: ops.Rotation,
        step: Step,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`attend`, with queries and keys that are still to be rotated."""
        q, k = ops.rope(q, *rotation), ops.rope(k, *rotation)
        return self.attend(q, k, v, step, scale=scale, softcap=softcap, sinks=sinks)


class AttentionState(SlotState, KeyValueState):
    """Keys `[R, K, S, D]` and values `[R, K, S, Dv]` in slots: position p of a row lies in slot `p % S`.

    Without a window S grows by doubling and nothing wraps. With one, the slots are a ring that holds the window,
    `rewind` slots of slack and the step.
    """

    what = "keys and values"

    def __init__(
        self,
        layout: Layout,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        window: int | None = None,
        chunk: int | None = None,
        shift: Callable[[Tensor, int], Tensor] | None = None,
    ):
        """`window`: a query sees that many positions, its own included. `chunk`: it sees its own chunk of that size.

        `shift(keys [K, S, D], delta)` rotates keys as if each had stood `delta` positions farther on (None: keys have
        no position); `State.drop` closes a gap with it.
        """
        self.window, self.chunk, self.shift = window, chunk, shift
        reaches = [size for size in (window, chunk) if size is not None]
        # The positions in sight, and as many as a rewind brings in sight.
        span = min(reaches) - 1 + layout.rewind if reaches else None
        self.kind = "attention" if span is None else "window"
        widths, dtypes = self.stored_as(kv_heads, {"k": head_dim, "v": value_dim or head_dim})
        super().__init__(layout, widths, span, dtypes)

    def stored_as(
        self, kv_heads: int, dims: dict[str, int]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
        """The buffers that hold keys and values of these widths, without rows and slots, and the dtypes of some."""
        return {name: (kv_heads, dim) for name, dim in dims.items()}, {}

    @property
    def rings(self) -> ops.Rings | None:
        return ops.Rings(self.buffers["k"], self.buffers["v"], self.window, self.chunk)

    @property
    def k(self) -> Tensor:
        return self.buffers["k"]

    @property
    def v(self) -> Tensor:
        return self.buffers["v"]

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        step: Step,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if k is not None and v is not None:
            ops.append(k, v, self.k, self.v, step.starts_t, step.counts_t)
        return ops.attend(
            q, self.k, self.v, step.starts_t, step.counts_t,
            scale=scale, window=self.window, chunk=self.chunk, softcap=softcap, sinks=sinks,
        )  # fmt: skip

    def rotate_attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: ops.Rotation,
        step: Step,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return ops.rotate_attend(
            q, k, v, rotation, self.k, self.v, step.starts_t, step.counts_t,
            scale=scale, window=self.window, chunk=self.chunk, softcap=softcap, sinks=sinks,
        )  # fmt: skip

    def lowest(self, position: int) -> int:
        low = 0 if self.window is None else max(0, position - self.window + 1)
        return low if self.chunk is None else max(low, position // self.chunk * self.chunk)

    def refuses_drop(self, row: int) -> str | None:
        return "its chunks begin at fixed positions" if self.chunk is not None else super().refuses_drop(row)

    def moved(self, name: str, stored: Tensor, delta: int) -> Tensor:
        return stored if name != "k" or self.shift is None else self.shift(stored, delta).to(stored)
