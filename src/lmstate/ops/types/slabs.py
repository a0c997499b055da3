"""Memory of blocks on a device where each operation is a launch: many blocks in one tensor, to be read and written
together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from lmstate.ops.types.block_table import BLOCK_TOKENS, Block

FEWEST = 16  # blocks of a slab
MOST = 32 << 20  # bytes of a slab, unless more are asked for at once


class BufferShape(NamedTuple):
    """Shape of what a block keeps of a position under one name: a vector for each of the heads."""

    heads: tuple[int, ...]  # (K,), or () where all heads share it
    width: int
    dtype: torch.dtype


class Slab:
    """Blocks side by side, the first of them of zeros and nobody's.

    `buffers`: `[blocks * B, K, D]` each, position by position, so that blocks that follow each other are one sequence.
    """

    def __init__(self, shapes: Sequence[BufferShape], blocks: int, device: torch.device) -> None:
        self.shapes, self.blocks = shapes, blocks
        with torch.inference_mode(False):
            self.buffers = tuple(
                torch.zeros((blocks + 1) * BLOCK_TOKENS, prod(s.heads), s.width, dtype=s.dtype, device=device)
                for s in shapes
            )
            self.whole = [buffer.unflatten(0, (-1, BLOCK_TOKENS)) for buffer in self.buffers]  # [blocks, B, K, D]
        self.addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.sizes = [buffer.nbytes // (blocks + 1) for buffer in self.buffers]  # of a block
        self.given = 0  # so many of the first ones were handed out, and may hold numbers
        self.free: list[int] = []  # of those, that came back

    def tensors(self, index: int, made: list[Tensor]) -> tuple[Tensor, ...]:
        """Of each buffer of a block, `[*heads, B, D]`: no views, so that gradients follow one block at a time."""
        for buffer, (heads, width, _) in zip(self.buffers, self.shapes):
            steps = (width, prod(heads) * width, 1) if heads else (width, 1)
            at = index * BLOCK_TOKENS * prod(heads) * width
            shape = (*heads, BLOCK_TOKENS, width)
            made.append(buffer.new_empty(0).set_(buffer.untyped_storage(), at, shape, steps))
        return tuple(made)

    def clear(self, indices: Sequence[int]) -> None:
        """Fill blocks with zeros."""
        for _, _, _, where in runs((self, range(index, index + 1)) for index in indices):
            for blocks in self.whole:
                if isinstance(where, slice):
                    blocks[where] = 0
                else:
                    blocks.index_fill_(0, where, 0)


class SlabBlock(Block):
    """A block of a slab, and the tensors that were made of it."""

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab, self.index = slab, index
        self.made: list[Tensor] = []
        pointers = tuple(address + index * size for address, size in zip(slab.addresses, slab.sizes))
        super().__init__(pointers, sum(slab.sizes), partial(slab.tensors, index, self.made))


class _Lease(ref[SlabBlock]):
    """The remains of a block that ended: where it lay, and its tensors."""

    __slots__ = ("index", "made", "slab")
    slab: Slab
    index: int
    made: list[Tensor]


class Slabs:
    """The slabs of one layer's blocks: each has room for as much again, up to `MOST` bytes.

    A block goes back to its slab once nobody holds it, and a slab that is empty to the device.
    """

    def __init__(self, shapes: Sequence[BufferShape], device: torch.device) -> None:
        self.shapes, self.device = tuple(shapes), device
        self._slabs: list[Slab] = []
        self._leases: dict[int, _Lease] = {}  # by their ids: nothing else keeps them
        # A block may end in any thread, in the middle of anything: what is called then is no line of Python.
        self._ended: deque[_Lease] = deque()
        self._lock = threading.Lock()

    def take(self, count: int, zeroed: bool) -> list[Block]:
        """Blocks that follow each other as far as that can be; of zeros, or of any numbers."""
        with self._lock:
            while self._ended:
                self._give_back(self._ended.popleft())
            blocks: list[Block] = []
            for slab in self._slabs:
                blocks += self._of(slab, count - len(blocks), zeroed)
            if len(blocks) < count:
                held = sum(slab.blocks for slab in self._slabs)
                size = sum(prod(s.heads) * s.width * s.dtype.itemsize for s in self.shapes) * BLOCK_TOKENS
                missing = count - len(blocks)
                more = max(missing, min(max(2 * missing, held), MOST // size), FEWEST)
                self._slabs.append(Slab(self.shapes, more, self.device))
                blocks += self._of(self._slabs[-1], count - len(blocks), zeroed)
        return blocks

    def _of(self, slab: Slab, most: int, zeroed: bool) -> list[Block]:
        again = [heappop(slab.free) for _ in range(min(most, len(slab.free)))]
        fresh = range(slab.given + 1, min(slab.given + most - len(again), slab.blocks) + 1)
        slab.given += len(fresh)
        if zeroed and again:
            slab.clear(again)
        return [self._block(slab, index) for index in (*again, *fresh)]

    def _block(self, slab: Slab, index: int) -> Block:
        block = SlabBlock(slab, index)
        lease = _Lease(block, self._ended.append)
        lease.slab, lease.index, lease.made = slab, index, block.made
        self._leases[id(lease)] = lease
        return block

    def _give_back(self, lease: _Lease) -> None:
        del self._leases[id(lease)]
        slab = lease.slab
        if any(tensor.requires_grad for tensor in lease.made):
            return  # a graph may read it: it stays out of use until the slab ends
        heappush(slab.free, lease.index)
        if len(slab.free) == slab.given and len(self._slabs) > 1:
            self._slabs.remove(slab)


class Run(NamedTuple):
    """Blocks, or positions, that one launch reads or writes."""

    slab: Slab
    first: int  # the place of the first one among all that are asked for, and behind the last
    last: int
    where: slice | Tensor  # in the slab


def runs(parts: Iterable[tuple[Slab, range]]) -> list[Run]:
    """Blocks or positions in this order, as few runs as they are in slabs one after the other."""
    merged: list[tuple[Slab, list[range]]] = []
    for slab, each in parts:
        if not merged or merged[-1][0] is not slab:
            merged.append((slab, [each]))
        elif merged[-1][1][-1].stop == each.start:
            merged[-1][1][-1] = range(merged[-1][1][-1].start, each.stop)
        else:
            merged[-1][1].append(each)
    found, done = [], 0
    for slab, ranges in merged:
        count = sum(map(len, ranges))
        found.append(Run(slab, done, done + count, _where(ranges, slab.buffers[0].device)))
        done += count
    return found


def gather(buffer: int, blocks: Sequence[Run]) -> Tensor:
    """Blocks of a buffer one after the other, `[n * B, K, D]`: a view where they lie so."""
    parts = []
    for slab, _, _, where in blocks:
        whole = slab.whole[buffer]
        parts.append(whole[where] if isinstance(where, slice) else whole.index_select(0, where))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(0, 1)


def scatter(buffer: int, positions: Sequence[Run], values: Tensor) -> None:
    """Write `values` `[n, K, D]`, rounded to the buffer's dtype."""
    for slab, first, last, where in positions:
        own, part = slab.buffers[buffer], values[first:last]
        if isinstance(where, slice):
            own[where] = part
        else:
            own.index_copy_(0, where, part.to(own.dtype))


def _where(ranges: Sequence[range], device: torch.device) -> slice | Tensor:
    """Indices: a slice if they follow each other, else on the device."""
    if len(ranges) == 1:
        return slice(ranges[0].start, ranges[0].stop)
    return on_device(np.concatenate([np.arange(each.start, each.stop) for each in ranges]).tobytes(), device)


@lru_cache(maxsize=256)
def on_device(indices: bytes, device: torch.device) -> Tensor:
    """int64 `[n]`: sent once, for layers whose blocks lie alike."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.frombuffer(indices, dtype=np.int64).copy()).to(device)
