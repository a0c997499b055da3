"""Memory in large pages, for weights: a core that reads them waits for page tables.

`python -m bench.layouts` compares them with a mapped file's pages of 4 KiB. They are filled faster too, with a fault
for each 2 MiB.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor

LARGE = sys.platform == "linux"
"""Whether the system has large pages that it gives to whoever asks."""
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


def spare() -> int:
    """Bytes that may be taken without pushing out what others use: half of what the system calls available."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024 // 2
    return sys.maxsize  # nobody tells
