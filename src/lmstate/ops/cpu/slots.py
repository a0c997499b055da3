"""The call into a native library's end of a step over slots in no order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lmstate.ops.cpu import abi
from lmstate.ops.cpu.arguments import float_pointer, function, integers
from lmstate.ops.types.slot_table import SlotCommit


class PackedSlotCommit(NamedTuple):
    """The arguments of one layer."""

    fields: bytes
    rows: int


class SlotBodies:
    """The body of one variant."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._commit = function(library, "lmstate_commit_slots")
        self._packed: WeakKeyDictionary[SlotCommit, PackedSlotCommit] = WeakKeyDictionary()

    def commit(self, changes: Sequence[SlotCommit], starts: Tensor, counts: Tensor, accepted: Tensor) -> None:
        """`commit_slots`."""
        commit, packed = self.prepare(changes, starts, counts, accepted)
        commit(packed)

    def prepare(
        self, changes: Sequence[SlotCommit], starts: Tensor, counts: Tensor, accepted: Tensor
    ) -> tuple[Callable[[bytes], int], bytes]:
        """The function of C and its argument, which points to the tensors."""
        rows = len(starts)
        starts, counts, accepted = (
            integers(x, "starts, counts and accepted", rows) for x in (starts, counts, accepted)
        )
        packed = [self._pack(change) for change in changes]
        if any(each.rows != rows for each in packed):
            raise ValueError(f"lists of other numbers of rows were given with the starts of {rows}")
        header = abi.COMMIT_SLOTS.pack(
            starts=starts.data_ptr(), counts=counts.data_ptr(), accepted=accepted.data_ptr(), layers=len(changes),
            rows=rows, threads=torch.get_num_threads(),
        )  # fmt: skip
        return self._commit, b"".join([header, *(each.fields for each in packed)])

    def _pack(self, change: SlotCommit) -> PackedSlotCommit:
        """Checked once: a change is not given other tensors, nor these other memory."""
        packed = self._packed.get(change)
        if packed is None:
            packed = self._packed[change] = pack(change)
        return packed


def pack(change: SlotCommit) -> PackedSlotCommit:
    """The arguments of one layer. ValueError where its tensors do not fit each other."""
    table = change.lists
    stored, undo_log, filled, undo_head = table.stored, table.undo_log, table.filled, table.undo_head
    rows, heads, slots = stored["position"].shape
    undo_slots = undo_log["position"].shape[2]
    arrays = list[bytes]()
    for name, array in stored.items():
        if name == "scores":
            continue
        width = array.shape[3] if array.ndim == 4 else 1
        for x, count in ((array, slots), (undo_log[name], undo_slots)):
            if x.numel() != rows * heads * count * width or not x.is_contiguous():
                raise ValueError(f"{name} {list(x.shape)} does not fit {rows} rows, {heads} heads and {count} slots")
        packed = abi.SLOT_ARRAY.pack(
            stored=array.data_ptr(), undo_log=undo_log[name].data_ptr(), bytes=width * array.element_size()
        )
        arrays.append(packed)
    scores = stored.get("scores")
    if len(arrays) > abi.SLOT_ARRAYS:
        raise ValueError(f"slots of {len(arrays)} tensors were given; there is room for {abi.SLOT_ARRAYS}")
    seen = gone = queries = ring = planes = wide = tokens = width = size = 0
    lowest: tuple[int, ...] = (0, 0, 0, 0, 0)
    if change.columns is not None:
        planes, wide = change.columns.shape[2:]
        seen = float_pointer(change.columns, "columns", (rows, heads, planes, wide))
    if isinstance(change.evicted, Tensor):
        evicted = change.evicted
        if evicted.shape != (rows, heads, slots) or evicted.dtype != torch.bool or not evicted.is_contiguous():
            raise ValueError(f"evicted is {evicted.dtype} {list(evicted.shape)}; slots are {[rows, heads, slots]}")
        gone = evicted.data_ptr()
    elif change.evicted is not None:
        lowest = change.evicted
    if change.queries is not None and change.ring is not None:
        (_, tokens, *each), size = change.queries.shape, change.ring.shape[1]
        queries = float_pointer(change.queries, "queries", (rows, tokens, *each))
        ring, width = float_pointer(change.ring, "ring", (rows, size, *each)), each[0] * each[1]
    budget, batch, sinks, newest, by_scores = lowest
    fields = abi.SLOT_COMMIT.pack(
        arrays=b"".join(arrays), positions=stored["position"].data_ptr(),
        scores=0 if scores is None else scores.data_ptr(), evicted_at=undo_log["evicted_at"].data_ptr(),
        slot=undo_log["slot"].data_ptr(), filled=filled.data_ptr(), undo_head=undo_head.data_ptr(), columns=seen,
        evicted=gone, queries=queries, ring=ring, kv_heads=heads, slots=slots, undo_slots=undo_slots,
        count=len(arrays), history=0 if scores is None else scores.shape[2], planes=planes, wide=wide,
        lowest=change.evicted is lowest, budget=budget, batch=batch, sinks=sinks, newest=newest, by_scores=by_scores,
        tokens=tokens, query_width=width, ring_size=size,
    )  # fmt: skip
    return PackedSlotCommit(fields, rows)
