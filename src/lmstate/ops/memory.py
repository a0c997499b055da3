"""Memory in large pages, for weights and for blocks of keys and values: a core that reads them waits for page tables.

`python -m bench.layouts` compares them with a mapped file's pages of 4 KiB. They are filled faster too, with a fault
for each 2 MiB.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections import deque
from math import prod
from pathlib import Path
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

LARGE = sys.platform == "linux"
"""Whether the system has large pages that it gives on request."""
CHUNK = 64 << 20  # bytes that small requests share, for a large page is as large as some matrices
LINE = 64

_lock = threading.Lock()
_chunk = torch.empty(0, dtype=torch.uint8)  # what is left of the last one


def zeroed(size: int) -> Tensor:
    """Zeros, uint8 `[size]`, that begin on a cache line. They are freed once nothing refers to them or their neighbors
    in a chunk: for what lives as long as a model."""
    global _chunk
    if size > CHUNK // 4:
        return torch.frombuffer(pages(size), dtype=torch.uint8)
    with _lock:
        if size > len(_chunk):
            _chunk = torch.frombuffer(pages(CHUNK), dtype=torch.uint8)
        taken, _chunk = _chunk[:size], _chunk[-(-size // LINE) * LINE :]
    return taken


def pages(size: int) -> mmap.mmap:
    """A buffer of its own, of zeros. It is freed once nothing refers to it. `size`: bytes, at least one. Raises
    MemoryError."""
    try:
        if not LARGE:
            return mmap.mmap(-1, size)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes are not to be had: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Pieces:
    """Memory in large pages for short-lived buffers, such as blocks of keys and values.

    Pieces of one size share slabs. A piece returns to its slab when its last reference ends. One empty slab is kept for
    each size.
    """

    SLAB = 8 << 20  # bytes

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slabs: dict[int, list[_Slab]] = {}  # by the size of a piece: those that have room, the last one first
        self._taken: dict[int, _Taken] = {}  # by their ids: nothing else keeps them
        # A piece may end in any thread, in the middle of anything: its callback runs no line of Python.
        self._ended: deque[_Taken] = deque()

    def take(self, size: int) -> PageSpan:
        """`size` bytes of any content, on a cache line. Raises MemoryError."""
        each = -(-size // LINE) * LINE
        if each > self.SLAB // 4:
            own = pages(size)
            return PageSpan(memoryview(own), _address(own))
        with self._lock:
            while self._ended:
                self._give_back(self._ended.popleft())
            slabs = self._slabs.setdefault(each, [])
            if not slabs:
                slabs.append(_Slab(pages(self.SLAB), each))
            slab, at = slabs[-1], slabs[-1].free.pop()
            if not slab.free:
                slabs.pop()
            memory = memoryview(slab.memory)[at : at + size]
            taken = _Taken(memory, self._ended.append)
            taken.slab, taken.at = slab, at
            self._taken[id(taken)] = taken
        return PageSpan(memory, slab.address + at)

    def _give_back(self, ended: _Taken) -> None:
        del self._taken[id(ended)]
        slab, slabs = ended.slab, self._slabs[ended.slab.each]
        if not slab.free:
            slabs.append(slab)
        slab.free.append(ended.at)
        if len(slab.free) == slab.pieces and len(slabs) > 1:
            slabs.remove(slab)


class PageSpan(NamedTuple):
    """Bytes that last as long as `memory` is referred to, and their address."""

    memory: memoryview
    address: int

    def tensor(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The numbers from byte `at` on, contiguous; no view of another tensor."""
        count = prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        # A view would be one of another tensor.
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=at).resize_(shape)


class _Taken(ref):
    __slots__ = ("at", "slab")
    slab: _Slab
    at: int


class _Slab:
    def __init__(self, memory: mmap.mmap, each: int) -> None:
        self.memory, self.each, self.pieces = memory, each, len(memory) // each
        self.address = _address(memory)
        self.free = [n * each for n in reversed(range(self.pieces))]


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


pieces = Pieces()


def spare() -> int:
    """Bytes that may be taken without pushing out what others use: half of what the system calls available."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024 // 2
    return sys.maxsize  # unknown
