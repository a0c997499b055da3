"""The call into a native library's end of a step over slots in no order, checked as in `library`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmstate.ops import cpu
from lmstate.ops.cpu.arguments import float_pointer, function, integers

if TYPE_CHECKING:
    from lmstate.ops.settle import Lowest, Queries, SlotLists

ARRAYS = 8
_LISTS = Struct("2Pq" * ARRAYS + "6P6q")
_STEP = Struct("8P8q")


class Settle:
    """The body of one variant."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._settle = function(library, "lmstate_settle")

    def __call__(
        self,
        lists: SlotLists,
        starts: Tensor,
        counts: Tensor,
        accepted: Tensor,
        columns: Tensor | None,
        evicted: Tensor | Lowest | None,
        queries: Queries | None,
    ) -> None:
        """`settle`."""
        rows, heads, slots = lists.kept["position"].shape
        starts, counts, accepted = (
            integers(x, "starts, counts and accepted", rows) for x in (starts, counts, accepted)
        )
        gone = evicts = planes = wide = sinks = newest = by_scores = 0
        if columns is not None:
            planes, wide = columns.shape[2:]
        if isinstance(evicted, Tensor):
            if evicted.shape != (rows, heads, slots) or evicted.dtype != torch.bool or not evicted.is_contiguous():
                raise ValueError(f"evicted is {evicted.dtype} {list(evicted.shape)}; slots are {[rows, heads, slots]}")
            gone = evicted.data_ptr()
        elif evicted is not None:
            lost = integers(evicted.counts, "counts of the evicted", rows)  # named, so that it lives through the call
            evicts = lost.data_ptr()
            sinks, newest, by_scores = evicted.sinks, evicted.newest, int(evicted.by_scores)
        asked: tuple[int, ...] = (0, 0)
        widths: tuple[int, ...] = (0, 0, 0)
        if queries is not None:
            new, ring = queries
            (_, tokens, *width), size = new.shape, ring.shape[1]
            asked = (
                float_pointer(new, "queries", (rows, tokens, *width)),
                float_pointer(ring, "ring", (rows, size, *width)),
            )
            widths = (tokens, width[0] * width[1], size)
        step = _STEP.pack(
            starts.data_ptr(), counts.data_ptr(), accepted.data_ptr(),
            0 if columns is None else float_pointer(columns, "columns", (rows, heads, planes, wide)),
            gone, evicts, *asked, planes, wide, sinks, newest, by_scores, *widths,
        )  # fmt: skip
        self._settle(lists.described + step)


def described(lists: SlotLists) -> bytes:
    """The first part of the arguments: what does not change from step to step."""
    kept, buried = lists.kept, lists.buried
    rows, heads, slots = kept["position"].shape
    graves = buried["position"].shape[2]
    fields: list[int] = []
    for name, array in kept.items():
        if name == "scores":
            continue
        width = array.shape[3] if array.ndim == 4 else 1
        for x, count in ((array, slots), (buried[name], graves)):
            if x.numel() != rows * heads * count * width or not x.is_contiguous():
                raise ValueError(f"{name} {list(x.shape)} does not fit {rows} rows, {heads} heads and {count} slots")
        fields += [array.data_ptr(), buried[name].data_ptr(), width * array.element_size()]
    count, scores = len(fields) // 3, kept.get("scores")
    if count > ARRAYS:
        raise ValueError(f"slots of {count} tensors were given; there is room for {ARRAYS}")
    return _LISTS.pack(
        *fields, *(0,) * (3 * (ARRAYS - count)), kept["position"].data_ptr(),
        0 if scores is None else scores.data_ptr(), buried["died"].data_ptr(), buried["slot"].data_ptr(),
        lists.live.data_ptr(), lists.dug.data_ptr(), rows, heads, slots, graves, count,
        0 if scores is None else scores.shape[2],
    )  # fmt: skip


@lru_cache
def settle(variant: str) -> Settle:
    """The body of the same variant as a `Library`."""
    return Settle(ctypes.CDLL(str(cpu.path_of(variant))))
