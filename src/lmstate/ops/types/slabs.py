"""Memory of blocks on a device where each operation is a launch: many blocks in one tensor, to be read and written
together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush, nsmallest
from itertools import chain, groupby
from math import prod
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeAlias
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from lmstate.ops.types.block_table import BLOCK_TOKENS, KVBlock

FEWEST = 16  # blocks of a slab
MOST = 32 << 20  # bytes of a slab, unless more are asked for at once


class BufferShape(NamedTuple):
    """Shape of what a block keeps of a position under one name: a vector for each of the heads."""

    heads: tuple[int, ...]  # (K,), or () where all heads share it
    width: int
    dtype: torch.dtype


class Slab:
    """Blocks side by side; the first holds zeros and has no holder.

    `buffers`: `[blocks * B, K, D]` each, position by position, so that blocks that follow each other are one sequence.
    """

    def __init__(self, shapes: Sequence[BufferShape], blocks: int, device: torch.device) -> None:
        self.shapes, self.blocks, self.device = shapes, blocks, device
        with torch.inference_mode(False):
            self.buffers = tuple(
                torch.zeros((blocks + 1) * BLOCK_TOKENS, prod(s.heads), s.width, dtype=s.dtype, device=device)
                for s in shapes
            )
            self.whole = [buffer.unflatten(0, (-1, BLOCK_TOKENS)) for buffer in self.buffers]  # [blocks, B, K, D]
        self.nbytes = sum(buffer.nbytes for buffer in self.buffers)
        self.block_nbytes = self.nbytes // (blocks + 1)
        self.given = 0  # the number of first blocks that were handed out, and may hold numbers
        self.free: list[int] = []  # of those, that came back

    def tensors(self, index: int) -> tuple[Tensor, ...]:
        """Of each buffer of a block, `[*heads, B, D]`: no views, so that gradients follow one block at a time."""
        made = []
        for buffer, (heads, width, _) in zip(self.buffers, self.shapes):
            steps = (width, prod(heads) * width, 1) if heads else (width, 1)
            at = index * BLOCK_TOKENS * prod(heads) * width
            shape = (*heads, BLOCK_TOKENS, width)
            made.append(buffer.new_empty(0).set_(buffer.untyped_storage(), at, shape, steps))
        return tuple(made)

    def clear(self, indices: Sequence[int]) -> None:
        """Fill blocks with zeros."""
        where = on_device(tuple(indices), self.device)
        for blocks in self.whole:
            blocks.index_fill_(0, where, 0)


class SlabBlock(KVBlock):
    """A block of a slab."""

    __slots__ = ("index", "lease", "slab")
    lease: _Lease

    def __init__(self, slab: Slab, index: int) -> None:
        super().__init__(slab.block_nbytes)
        self.slab, self.index = slab, index

    @property
    def pointers(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self.tensors)

    def make(self) -> tuple[Tensor, ...]:
        self.lease.made = self.slab.tensors(self.index)
        return self.lease.made


class _Lease(ref[SlabBlock]):
    """The remains of a block that ended: where it lay, and its tensors."""

    __slots__ = ("index", "made", "slab")
    slab: Slab
    index: int
    made: tuple[Tensor, ...]


class Slabs:
    """The slabs of one layer's blocks: each has room for as much again, up to `MOST` bytes.

    A block goes back to its slab once it is not held any more, and an empty slab to the device when blocks are taken
    next, but for one of no more than `MOST` bytes.
    """

    def __init__(self, shapes: Sequence[BufferShape], device: torch.device) -> None:
        self.shapes, self.device = tuple(shapes), device
        self._slabs: list[Slab] = []
        self._leases: dict[int, _Lease] = {}  # by their ids: nothing else keeps them
        # A block may end in any thread, in the middle of anything: its callback runs no line of Python.
        self._ended: deque[_Lease] = deque()
        self._awaited: list[tuple[_Lease, list[ref[Tensor]]]] = []  # those that ended, but a graph may read them
        self._lock = threading.Lock()

    def take(self, count: int, zeroed: bool) -> list[KVBlock]:
        """Blocks that follow each other as far as that can be; of zeros, or of any numbers."""
        with self._lock:
            while self._ended:
                self._end(self._ended.popleft())
            awaited, self._awaited = self._awaited, []
            for lease, tensors in awaited:
                self._give_back(lease, tensors)
            blocks: list[KVBlock] = []
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

    def _of(self, slab: Slab, most: int, zeroed: bool) -> list[KVBlock]:
        again = nsmallest(most, slab.free)
        if zeroed and again:
            slab.clear(again)  # while they are free: it may fail
        for _ in again:
            heappop(slab.free)
        fresh = range(slab.given + 1, min(slab.given + most - len(again), slab.blocks) + 1)
        slab.given += len(fresh)
        return [self._block(slab, index) for index in (*again, *fresh)]

    def _block(self, slab: Slab, index: int) -> KVBlock:
        block = SlabBlock(slab, index)
        lease = _Lease(block, self._ended.append)
        lease.slab, lease.index, lease.made = slab, index, ()
        self._leases[id(lease)] = block.lease = lease
        return block

    def _end(self, lease: _Lease) -> None:
        del self._leases[id(lease)]
        tensors, lease.made = [ref(tensor) for tensor in lease.made if tensor.requires_grad], ()
        self._give_back(lease, tensors)

    def _give_back(self, lease: _Lease, tensors: list[ref[Tensor]]) -> None:
        """A place to its slab, unless one of the tensors is still there: a graph that keeps one keeps its object."""
        if any(tensor() is not None for tensor in tensors):
            self._awaited.append((lease, tensors))
            return
        slab = lease.slab
        heappush(slab.free, lease.index)
        if len(slab.free) == slab.given and (len(self._slabs) > 1 or slab.nbytes > MOST):
            self._slabs.remove(slab)


class Run(NamedTuple):
    """Blocks, or positions, that one launch reads or writes."""

    slab: Slab
    first: int  # the place of the first one among all that are asked for, and after the last
    last: int
    where: slice | Tensor  # in the slab


Span: TypeAlias = tuple[Sequence[SlabBlock], int, int]
"""Positions `first .. last` of blocks that follow each other in a row."""


def block_runs(blocks: Sequence[SlabBlock]) -> list[Run]:
    """Blocks in this order, in as few runs as they are in slabs one after the other."""
    return _runs([(slab, [block.index for block in same]) for slab, same in groupby(blocks, attrgetter("slab"))])


def position_runs(spans: Sequence[Span]) -> list[Run]:
    """Positions of rows in this order, likewise."""
    return _runs([part for span in spans for part in _positions(*span)])


def _positions(blocks: Sequence[SlabBlock], first: int, last: int) -> Iterator[tuple[Slab, Sequence[int]]]:
    if len(blocks) == 1:
        begin = blocks[0].index * BLOCK_TOKENS
        yield blocks[0].slab, range(begin + first, begin + last)
        return
    done = 0
    for slab, same in groupby(blocks, attrgetter("slab")):
        indices = [block.index for block in same]
        a, b = max(first - done, 0), min(last - done, len(indices) * BLOCK_TOKENS)
        done += len(indices) * BLOCK_TOKENS
        if _adjacent(indices):
            yield slab, range(indices[0] * BLOCK_TOKENS + a, indices[0] * BLOCK_TOKENS + b)
        else:
            every = np.array(indices)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
            yield slab, every.ravel()[a:b].tolist()


def _runs(parts: Sequence[tuple[Slab, Sequence[int]]]) -> list[Run]:
    found, done = [], 0
    for slab, same in groupby(parts, itemgetter(0)):
        ranges = [each for _, each in same]
        indices = ranges[0] if len(ranges) == 1 else [*chain.from_iterable(ranges)]
        where = slice(indices[0], indices[-1] + 1) if _adjacent(indices) else on_device(tuple(indices), slab.device)
        found.append(Run(slab, done, done + len(indices), where))
        done += len(indices)
    return found


def _adjacent(indices: Sequence[int]) -> bool:
    return isinstance(indices, range) or indices == [*range(indices[0], indices[0] + len(indices))]


def gather(buffer: int, blocks: Sequence[Run]) -> Tensor:
    """Blocks of a buffer one after the other, `[n * B, K, D]`: a view where they are so."""
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


def clear(buffer: int, positions: Sequence[Run]) -> None:
    """Write zeros."""
    for slab, _, _, where in positions:
        own = slab.buffers[buffer]
        if isinstance(where, slice):
            own[where] = 0
        else:
            own.index_fill_(0, where, 0)


@lru_cache(maxsize=16)
def on_device(indices: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 `[n]`: sent once, for layers whose blocks are alike."""
    with torch.inference_mode(False):
        return torch.tensor(indices, dtype=torch.int64).to(device)
