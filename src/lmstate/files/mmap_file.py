"""A file mapped into memory, and tensors that lie in it without a copy."""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path

import torch
from torch import Tensor

from lmstate.errors import ModelError

SAMPLES, SAMPLE_BYTES = 16, 16 * 1024


class MappedFile:
    """A whole file as a buffer. Copy-on-write: tensors in it may be written to, the file never changes."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.size = file.seek(0, 2)
            if self.size == 0:
                raise ModelError(f"{path} is empty; download it again")
            self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.path = path

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor at a byte offset, which the caller has checked to lie inside the file."""
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if offset % dtype.itemsize == 0:
            return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset).view(shape)
        # Old writers do not align. Kernels may assume that numbers lie on their natural boundary: copy.
        raw = torch.frombuffer(self.buffer, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
        return raw.clone().view(dtype).view(shape)


def fingerprint(paths: list[Path]) -> str:
    """Identifies the content of files without reading them whole: place, size, time, and samples spread over each."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            digest.update(f"{path.resolve()}\0{size}\0{path.stat().st_mtime_ns}\0".encode())
            for index in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
