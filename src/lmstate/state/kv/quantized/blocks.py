"""Attention states that keep every token in 4, 3 or 2 bits an element, and the newest keys as floats too."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lmstate import ops
from lmstate.ops.attention.attend_quantized import WHOLE, attend_quantized
from lmstate.ops.types import kv_format
from lmstate.ops.types.kv_format import BLOCK
from lmstate.state.gradients import refused, wanted
from lmstate.state.kv.policies.storage import Quantized
from lmstate.state.kv.quantized.attention import LOSS, REFUSAL, coded_buffers, detached, quantized_kv
from lmstate.state.layers.attention import KeyValueState
from lmstate.state.layers.base import Layout
from lmstate.state.layers.block_store import BlockStore
from lmstate.state.layers.composite import CompositeState
from lmstate.state.layers.slots import SlotState
from lmstate.state.step import Step


class BlockState(CompositeState, KeyValueState):
    """Codes of values, and of keys in blocks of positions that are whole; and the newest keys as floats.

    A block of keys is quantized, once, from the floats, when its last token is stored. A query reads codes or floats of
    a block by its own position (`ops.attend_quantized`), so that no cut of the stream shows; the floats go back far
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
        assert isinstance(self.codes.content, BlockStore) and isinstance(self.tail.content, BlockStore)
        self.tail.content.views = self.codes.content.views

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

    def attend_stored(self, q: Tensor, step: Step, params: ops.AttentionParams, mask: ops.CausalMask) -> Tensor:
        kv, spans = self._quantized_kv(), (step.starts_t, step.counts_t)
        seen = attend_quantized(q, None, None, kv, *spans, params, mask, dtype=self.layout.dtype)
        return refused(seen, LOSS) if wanted(q) else seen

    def _quantized_kv(self) -> ops.QuantizedKV:
        return quantized_kv(self.codes.all_stored(), self.bits, self.tail.stored("k"))

    def kept(self, row: int, length: int) -> list[list[int]]:
        return [list(range(self.mask.first_visible(length), length)) for _ in range(self.codes.buffers["k"].heads[0])]

    def refuses_drop(self, row: int) -> str | None:
        return REFUSAL

    def leaves(self) -> list[KeyValueState]:  # type: ignore[override]  # narrower, as the list is only read
        return [self]


class Codes(SlotState):
    """Codes and scales; those of a block of keys are across its positions."""

    kind, what = "attention", "blocks of quantized keys and values"

    def __init__(self, layout: Layout, bits: int, kv_heads: int, dims: dict[str, int], mask: ops.CausalMask):
        # Of the first block in sight all positions: its scales are across them.
        window_span = None if mask.span is None else mask.span - 1 + BLOCK - 1 + layout.rewind
        widths, dtypes = coded_buffers(dims, bits, kv_heads, most=WHOLE)
        widths["k.scale"] = (kv_heads, kv_format.block_scales(dims["k"]))
        super().__init__(layout, widths, window_span, dtypes)

    def capture(self, row: int, length: int) -> Mapping[str, Tensor]:
        assert isinstance(self.content, BlockStore)
        whole = length // BLOCK * BLOCK  # what is after it is of a block that is not whole yet
        return self.content.capture(row, length, {"k": whole, "k.scale": whole})


class Floats(SlotState):
    """The newest keys: what queries read as floats, from any position that a rewind reaches."""

    kind, what = "attention", "the newest keys"

    def __init__(self, layout: Layout, kv_heads: int, dim: int):
        super().__init__(layout, {"k": (kv_heads, dim)}, BLOCK - 1 + layout.rewind)
