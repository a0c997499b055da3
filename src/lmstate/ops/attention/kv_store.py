"""Storing new tokens' keys and values in their rows' rings or blocks."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cuda import attention as cuda
from lmstate.ops.types.block_table import BlockTable, Stored
from lmstate.ops.types.slab_table import SlabTable


def append(k_new: Tensor, v_new: Tensor, k: Stored, v: Stored, starts: Tensor, counts: Tensor) -> None:
    """Write new token i < counts[r] of row r into slot (starts[r] + i) % S of `k` and `v`; padding is not written.

    k_new: float32 `[R, T, K, D]`, v_new: `[R, T, K, Dv]`. k: `[R, K, S, D]`, v: `[R, K, S, Dv]`, changed in place,
    rounded to their dtype. starts, counts: int64 `[R]`, counts <= S.
    """
    library = dispatch.native(k_new, v_new, k, v)
    if library is not None and library.attention.can_append(k_new, v_new, k, v):
        library.attention.append(k_new, v_new, k, v, starts, counts)
    elif dispatch.gpu(k_new, v_new, k, v) and cuda.can_read(k, v):
        cuda.append(k_new, cast(SlabTable, k), starts, counts)
        cuda.append(v_new, cast(SlabTable, v), starts, counts)
    else:
        append_reference(k_new, v_new, k, v, starts, counts)


def append_reference(k_new: Tensor, v_new: Tensor, k: Stored, v: Stored, starts: Tensor, counts: Tensor) -> None:
    for new, ring in ((k_new, k), (v_new, v)):
        append_one(new, ring, starts, counts)


def append_one(new: Tensor, ring: Stored, starts: Tensor, counts: Tensor) -> None:
    """new `[R, T, K, D]` into `[R, K, S, D]`: keys, or values, as `append` stores them."""
    if isinstance(ring, BlockTable):
        ring.write(new, starts, counts)
        return
    if torch.compiler.is_compiling() or not starts.is_cpu:
        _append_on_device(new, ring, starts, counts)
        return
    size = ring.shape[2]
    for r, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        if count > size:
            raise ValueError(f"{count} new tokens do not fit a ring of {size} slots: store fewer at a time")
        first = start % size
        before = min(count, size - first)  # tokens up to the ring's end; the others go to its beginning
        tokens = new[r, :count].transpose(0, 1)  # [K, count, D]
        ring[r, :, first : first + before] = tokens[:, :before]
        ring[r, :, : count - before] = tokens[:, before:]


def _append_on_device(new: Tensor, ring: Tensor, starts: Tensor, counts: Tensor) -> None:
    """Without reading the counts on the host. Padding writes back what its slot holds: its own, or a later one."""
    rows, width, _, _ = new.shape
    offsets = torch.arange(width, device=new.device)
    row = torch.arange(rows, device=new.device)[:, None].expand(rows, width)
    slot = (starts[:, None] + offsets) % ring.shape[2]
    real = (offsets < counts[:, None])[:, :, None, None]
    stored = ring[row, :, slot]  # [R, T, K, D]
    ring[row, :, slot] = torch.where(real, new.to(ring.dtype), stored)
