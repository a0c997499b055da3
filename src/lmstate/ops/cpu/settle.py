"""The call into a native library's end of a step over slots in no order, checked as in `library`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lmstate.ops import cpu
from lmstate.ops.cpu.arguments import float_pointer, function, integers

if TYPE_CHECKING:
    from lmstate.ops.settle import Change, SlotLists

ARRAYS = 8
_HEADER = Struct("3q")
_LISTS = Struct("2Pq" * ARRAYS + "6P5q")
_STEP = Struct("8P8q")


class Described(NamedTuple):
    """Lists of slots as C reads them; what does not change from step to step."""

    fields: bytes
    rows: int
    heads: int
    slots: int


class Settle:
    """The body of one variant."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._settle = function(library, "lmstate_settle")

    def __call__(self, changes: Sequence[Change], starts: Tensor, counts: Tensor, accepted: Tensor) -> None:
        """`settle`."""
        rows = len(starts)
        spans = tuple(integers(x, "starts, counts and accepted", rows) for x in (starts, counts, accepted))
        pointers = tuple(x.data_ptr() for x in spans)
        packed = [_HEADER.pack(len(changes), rows, torch.get_num_threads())]
        alive: list[Tensor] = []  # what only the packed pointers know of
        for change in changes:
            described = change.lists.described
            if described.rows != rows:
                raise ValueError(f"lists of {described.rows} rows were given with the starts of {rows}")
            packed += [described.fields, self._step(change, pointers, described, alive)]
        self._settle(b"".join(packed))

    def _step(
        self, change: Change, spans: tuple[int, ...], described: Described, alive: list[Tensor]
    ) -> bytes:
        """The second part of a layer's arguments."""
        _, columns, evicted, queries = change
        _, rows, heads, slots = described
        gone = evicts = seen = planes = wide = sinks = newest = by_scores = new = ring = tokens = width = size = 0
        if columns is not None:
            planes, wide = columns.shape[2:]
            seen = float_pointer(columns, "columns", (rows, heads, planes, wide))
        if isinstance(evicted, Tensor):
            if evicted.shape != (rows, heads, slots) or evicted.dtype != torch.bool or not evicted.is_contiguous():
                raise ValueError(f"evicted is {evicted.dtype} {list(evicted.shape)}; slots are {[rows, heads, slots]}")
            gone = evicted.data_ptr()
        elif evicted is not None:
            lost = integers(evicted.counts, "counts of the evicted", rows)
            alive.append(lost)
            evicts, sinks, newest, by_scores = lost.data_ptr(), evicted.sinks, evicted.newest, int(evicted.by_scores)
        if queries is not None:
            (_, tokens, *each), size = queries.new.shape, queries.ring.shape[1]
            new = float_pointer(queries.new, "queries", (rows, tokens, *each))
            ring, width = float_pointer(queries.ring, "ring", (rows, size, *each)), each[0] * each[1]
        return _STEP.pack(
            *spans, seen, gone, evicts, new, ring, planes, wide, sinks, newest, by_scores, tokens, width, size
        )


def described(lists: SlotLists) -> Described:
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
    packed = _LISTS.pack(
        *fields, *(0,) * (3 * (ARRAYS - count)), kept["position"].data_ptr(),
        0 if scores is None else scores.data_ptr(), buried["died"].data_ptr(), buried["slot"].data_ptr(),
        lists.live.data_ptr(), lists.dug.data_ptr(), heads, slots, graves, count,
        0 if scores is None else scores.shape[2],
    )  # fmt: skip
    return Described(packed, rows, heads, slots)


@lru_cache
def settle(variant: str) -> Settle:
    """The body of the same variant as a `Library`."""
    return Settle(ctypes.CDLL(str(cpu.path_of(variant))))
