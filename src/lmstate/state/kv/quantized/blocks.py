"""Attention states that keep every token in 4 or 2 bits an element, and the newest keys as floats too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops.attention.attend_quantized import WHOLE, attend_quantized
from lmstate.ops.types import kv_format
from lmstate.ops.types.kv_format import BLOCK
from lmstate.state.changes import Changes
from lmstate.state.gradients import refused, wanted
from lmstate.state.kv.policies.storage import Quantized
from lmstate.state.kv.quantized.attention import LOSS, REFUSAL, coded_buffers, detached, quantized_kv
from lmstate.state.layers.attention import KeyValueState
from lmstate.state.layers.base import Layout
from lmstate.state.layers.composite import CompositeState
from lmstate.state.layers.slots import Buffers, SlotState
from lmstate.state.step import Step

SHORT = 32
"""Slots of the ring of floats that are not given back: room for steps of so many tokens."""


class BlockState(CompositeState, KeyValueState):
    """Codes of values, and of keys in blocks of positions that are whole, in slots or in a window's ring; and a ring of
    keys as floats.

    A block of keys is quantized, once, from the floats, when its last token is stored. A query reads codes or floats of
    a block by its own position (`ops.attend_quantized`), so that no cut of the stream shows; the ring goes back far
    enough for that from any position inside the rewind window. A block's codes of keys are never read before it is
    whole.
    """

    def __init__(
        self,
        layout: Layout,
        storage: Quantized,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        mask: ops.CausalMask = ops.FULL_CAUSAL,
    ):
        self.layout, self.bits, self.mask = layout, storage.bits, mask
        dims = {"k": head_dim, "v": value_dim or head_dim}
        self.codes, self.tail = Codes(layout, self.bits, kv_heads, dims, mask), Floats(layout, kv_heads, head_dim)
        super().__init__((self.codes, self.tail))
        self.kind = "attention" if mask.span is None else "window"
        self.tail.view_cache = self.codes.view_cache

    def view(self, step: Step) -> ops.KVView | None:
        view_cache = self.codes.view_cache
        if not view_cache:
            kv = self._quantized_kv()
            view_cache.append(ops.KVView(kv.k, kv.v, self.mask, quantized=kv))
        return view_cache[0]

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        params: ops.AttentionParams,
        rotation: ops.RopeTables | None = None,
    ) -> Tensor:
        seen = attend_quantized(
            q, detached(new), rotation, self._quantized_kv(), step.starts_t, step.counts_t,
            params, self.mask, dtype=self.layout.dtype,
        )  # fmt: skip
        return refused(seen, LOSS) if wanted(q, *(new or ())) else seen

    def _quantized_kv(self) -> ops.QuantizedKV:
        return quantized_kv(self.codes.buffers, self.bits, self.tail.buffers["k"])

    def capture(self, row: int, length: int) -> dict[str, Tensor]:
        captured = super().capture(row, length)
        for name in ("k", "k.scale"):  # the last block is not whole: what its slots hold is of no time
            coded = captured[f"0.{name}"]
            coded[..., coded.shape[-2] - min(length % BLOCK, coded.shape[-2]) :, :] = 0
        return captured

    def kept(self, row: int, length: int) -> list[list[int]]:
        return [list(range(self.mask.first_visible(length), length)) for _ in range(self.codes.buffers["k"].shape[1])]

    def refuses_drop(self, row: int) -> str | None:
        return REFUSAL

    def leaves(self) -> list[KeyValueState]:  # type: ignore[override]  # narrower, as the list is only read
        return [self]


class Codes(SlotState):
    """Codes and scales in a number of slots that blocks fill: a block's slots follow each other."""

    kind, what = "attention", "blocks of quantized keys and values"

    def __init__(self, layout: Layout, bits: int, kv_heads: int, dims: dict[str, int], mask: ops.CausalMask):
        window_span, slack = None, layout.rewind
        if mask.span is not None:
            need = mask.span - 1 + BLOCK - 1  # of the first block in sight all slots: its scales lie across them
            window_span = _filled(need + layout.rewind + 1) - 1
            slack = window_span - need  # filled blocks reach farther back than was asked for
        widths, dtypes = coded_buffers(dims, bits, kv_heads, most=WHOLE)
        widths["k.scale"] = (kv_heads, kv_format.block_scales(dims["k"]))
        capacity = None if layout.capacity is None else _filled(layout.capacity)
        super().__init__(replace(layout, capacity=capacity, rewind=slack), widths, window_span, dtypes)

    def _grown(self, need: int, most: int | None) -> int:
        return _filled(super()._grown(need, most))


class Floats(SlotState):
    """The newest keys: what queries read as floats, from any position that a rewind reaches."""

    kind, what = "attention", "the newest keys"

    def __init__(self, layout: Layout, kv_heads: int, dim: int):
        super().__init__(replace(layout, capacity=None), {"k": (kv_heads, dim)}, BLOCK - 1 + layout.rewind)

    def reserve(self, step: Step) -> None:
        assert self.window_span is not None
        if (smaller := self._shrunk(self.window_span + max(step.width, 1), step.starts)) is not None:
            self._use(*smaller)
        super().reserve(step)

    def commit(self, step: Step, accepted: tuple[int, ...], changes: Changes) -> None:
        assert self.window_span is not None
        super().commit(step, accepted, changes)
        # Where an idle row ends is known when a step begins: it may have been rewound or restored since.
        ends = [start + n for start, n in zip(step.starts, accepted)] if all(step.counts) else None
        if ends is not None and (smaller := self._shrunk(self.window_span + 1, ends)) is not None:
            self._hold(*smaller, changes)

    def _shrunk(self, slots: int, ends: Sequence[int]) -> tuple[Buffers, list[int]] | None:
        """Copies with so many slots for rows that end there, and their `written_to`; None where there are few more.

        A long step needed room for all its tokens: it is given back.
        """
        if self.slots <= slots + SHORT:
            return None
        smaller = {name: b.new_zeros(*b.shape[:-2], slots, b.shape[-1]) for name, b in self.buffers.items()}
        written_to = []
        for row, end in enumerate(ends):
            lost = self.written_to[row] - self.slots
            positions = torch.arange(max(0, end - slots, lost), end, device=self.layout.device)
            smaller["k"][row][..., positions % slots, :] = self.buffers["k"][row][..., positions % self.slots, :]
            written_to.append(max(end, lost + slots))  # what was lost there is lost here
        return smaller, written_to


def _filled(slots: int) -> int:
    """As many, or more, that blocks fill."""
    return -(-slots // BLOCK) * BLOCK
