"""Attention states that keep every token in 8 bits or fewer an element: full, of a window, latent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops.attention.attend_blocks import attend_coded_blocks
from lmstate.ops.attention.attend_latent import attend_latent
from lmstate.ops.attention.attend_quantized import WHOLE, attend_quantized, store_quantized
from lmstate.ops.attention.choose import attend_chosen, gather_positions
from lmstate.ops.types import kv_format
from lmstate.ops.types.block_table import Stored, dense
from lmstate.state.gradients import refused, wanted
from lmstate.state.kv.policies.storage import Quantized
from lmstate.state.layers.attention import AttentionState
from lmstate.state.layers.base import Layout
from lmstate.state.layers.indexed_attention import ChosenBlocksState, IndexedAttentionState
from lmstate.state.layers.latent import IndexKeys, LatentState, Shift
from lmstate.state.layers.slots import SlotState
from lmstate.state.step import Step

REFUSAL = "its keys are quantized as they were rotated, and never a second time"
LOSS = "quantized keys and values"


class QuantizedAttentionState(AttentionState):
    """8-bit codes and scales of keys and values, after a Hadamard transform, in slots or in a window's ring.

    A token is stored before its step attends, so that it reads of itself what later ones will read.
    """

    what = "quantized keys and values"

    def stored_as(
        self, kv_heads: int, dims: dict[str, int]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
        return coded_buffers(dims, 8, kv_heads, most=WHOLE)

    def new_view(self) -> ops.KVView:
        return ops.KVView(self.stored("k"), self.stored("v"), self.mask, quantized=quantized_kv(self.all_stored(), 8))

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        params: ops.AttentionParams,
        rotation: ops.RopeTables | None = None,
    ) -> Tensor:
        kv = quantized_kv(self.all_stored(), 8)
        seen = attend_quantized(
            q, detached(new), rotation, kv, step.starts_t, step.counts_t, params, self.mask, dtype=self.layout.dtype
        )
        return refused(seen, LOSS) if wanted(q, *(new or ())) else seen

    def attend_stored(self, q: Tensor, step: Step, params: ops.AttentionParams, mask: ops.CausalMask) -> Tensor:
        kv, spans = quantized_kv(self.all_stored(), 8), (step.starts_t, step.counts_t)
        seen = attend_quantized(q, None, None, kv, *spans, params, mask, dtype=self.layout.dtype)
        return refused(seen, LOSS) if wanted(q) else seen

    def refuses_drop(self, row: int) -> str | None:
        return REFUSAL


class QuantizedChosenBlocksState(ChosenBlocksState, QuantizedAttentionState):
    """8-bit codes and scales, of which a step may attend to chosen blocks alone."""

    def attend_chosen(
        self, q: Tensor, new: tuple[Tensor, Tensor], chosen: Tensor, step: Step, params: ops.AttentionParams
    ) -> Tensor:
        kv, spans = quantized_kv(self.all_stored(), 8), (step.starts_t, step.counts_t)
        store_quantized(q, (new[0].detach(), new[1].detach()), kv, *spans, params)
        seen = attend_coded_blocks(q, kv, chosen, *spans, params, size=self.size, dtype=self.layout.dtype)
        return refused(seen, LOSS) if wanted(q, *new) else seen


class QuantizedIndexedAttentionState(IndexedAttentionState, QuantizedChosenBlocksState):
    """The same, and the keys of an index as they are."""

    what = "quantized keys and values, and index keys"


class QuantizedLatentState(LatentState):
    """Codes and scales of latents and rope keys, after a Hadamard transform."""

    what = "quantized latents and rope keys"

    def __init__(
        self,
        layout: Layout,
        storage: Quantized,
        latent_dim: int,
        rope_dim: int,
        *,
        rotate_by: Shift | None = None,
        beside: Mapping[str, tuple[int, ...]] | None = None,
        window: int | None = None,
    ):
        self.bits, self.rotate_by = storage.bits, rotate_by
        self._lost = False  # whether what is stored of the step had a gradient to follow
        widths, dtypes = coded_buffers({"latent": latent_dim, "rope": rope_dim}, self.bits)
        SlotState.__init__(self, layout, {**widths, **(beside or {})}, self.windowed(window, layout), dtypes)

    def store(self, latent: Tensor, rope_key: Tensor, step: Step) -> None:
        self._lost = wanted(latent, rope_key)
        coded = [kv_format.encode(kv_format.hadamard(new[:, :, None]), self.bits) for new in (latent, rope_key)]
        for (one, other), end in zip(zip(*coded), ("", ".scale")):
            latents, rope_keys = (self.stored(name + end) for name in ("latent", "rope"))
            ops.append(one, other, latents, rope_keys, step.starts_t, step.counts_t)

    def latents(self, step: Step) -> tuple[Tensor, Tensor]:
        latent, rope_key = (kv_format.hadamard(x).to(self.layout.dtype) for x in self._transformed(step))
        return (refused(latent, LOSS), refused(rope_key, LOSS)) if self._lost else (latent, rope_key)

    def _transformed(self, step: Step) -> tuple[Tensor, Tensor]:
        end = max(step.ends, default=0) if self.window is None else None  # of a window a ring
        return self._expanded(lambda held: dense(held)[:, 0, :end])

    def _expanded(self, read: Callable[[Stored], Tensor]) -> tuple[Tensor, Tensor]:
        """Latents and rope keys `[R, N, ...]` in the layout's dtype, of the parts that `read` takes of each buffer."""
        names = ("latent", "latent.scale", "rope", "rope.scale")
        codes, scales, rope_codes, rope_scales = (read(self.stored(name)) for name in names)
        latent = kv_format.decode(codes, scales, self.bits, self.layout.dtype)
        return latent, kv_format.decode(rope_codes, rope_scales, self.bits, self.layout.dtype)

    def attend_latents(
        self, q_latent: Tensor, q_rope: Tensor, step: Step, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        q_latent, q_rope = kv_format.hadamard(q_latent), kv_format.hadamard(q_rope)
        seen = attend_latent(
            q_latent, q_rope, *self._transformed(step), step.starts_t, step.counts_t, scale=scale, window=self.window,
            sinks=sinks,
        )  # fmt: skip
        seen = kv_format.hadamard(seen)
        return refused(seen, LOSS) if self._lost or wanted(q_latent, q_rope) else seen

    def attend_chosen(
        self, q_latent: Tensor, q_rope: Tensor, chosen: Tensor, step: Step, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        q_latent, q_rope = kv_format.hadamard(q_latent), kv_format.hadamard(q_rope)
        count = chosen.shape[1] * chosen.shape[2]
        if count < max(step.ends, default=0):  # what is expanded follows what is chosen
            expanded = self._expanded(lambda held: gather_positions(held, chosen.flatten(1)))
            chosen = torch.arange(count, device=chosen.device).view(chosen.shape[1:]).where(chosen >= 0, -1)
        else:
            expanded = self._transformed(step)
        latent, rope_key = (part[:, None] for part in expanded)
        seen = kv_format.hadamard(attend_chosen(q_latent, q_rope, latent, rope_key, chosen, scale=scale, sinks=sinks))
        return refused(seen, LOSS) if self._lost or wanted(q_latent, q_rope) else seen

    def refuses_drop(self, row: int) -> str | None:
        return REFUSAL


class QuantizedIndexedLatentState(IndexKeys, QuantizedLatentState):
    """Codes of latents and rope keys, and the keys of an index as they are: a choice is made of what was computed."""

    what = "quantized latents and rope keys, and index keys"

    def __init__(
        self,
        layout: Layout,
        storage: Quantized,
        latent_dim: int,
        rope_dim: int,
        index_dim: int,
        *,
        rotate_index_by: Shift,
    ):
        self.rotate_index_by = rotate_index_by
        super().__init__(layout, storage, latent_dim, rope_dim, beside={"index": (index_dim,)})


def detached(new: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    return None if new is None else (new[0].detach(), new[1].detach())


def quantized_kv(buffers: Mapping[str, Stored], bits: int, tail: Stored | None = None) -> ops.QuantizedKV:
    """Codes and scales as an operation takes them."""
    return ops.QuantizedKV(bits, buffers["k"], buffers["v"], buffers["k.scale"], buffers["v.scale"], tail)


def coded_buffers(
    dims: dict[str, int], bits: int, *heads: int, most: int = kv_format.GROUP
) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """The buffers for vectors of these widths, codes under their name and scales beside them, and their dtypes."""
    widths: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, dim in dims.items():
        codes, scales = kv_format.widths(dim, bits, most)
        widths |= {name: (*heads, codes), f"{name}.scale": (*heads, scales)}
        dtypes |= {name: kv_format.code_dtype(bits), f"{name}.scale": torch.float16}
    return widths, dtypes
