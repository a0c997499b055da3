"""A file as a buffer of tensors: mapped into memory without a copy, or read into tensors of their own."""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from lmstate.errors import ModelError
from lmstate.files.regular import open_regular

SAMPLES, SAMPLE_BYTES = 16, 16 * 1024


class FileBuffer:
    """The content of a whole file in memory. Tensors are views of it, and may be written to."""

    def __init__(self, path: Path, buffer: mmap.mmap | bytearray) -> None:
        self.path, self.buffer, self.size = path, buffer, len(buffer)

    def bytes(self, start: int, stop: int) -> bytes:
        return bytes(self.buffer[start:stop])

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor at a byte offset, which the caller has checked to be inside the file."""
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if offset % dtype.itemsize == 0:
            return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset).view(shape)
        # Old writers do not align. Kernels may assume that numbers are on their natural boundary: copy.
        raw = torch.frombuffer(self.buffer, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
        return raw.clone().view(dtype).view(shape)


class MappedFile(FileBuffer):
    """A whole file as a buffer. Copy-on-write: tensors in it may be written to, the file never changes."""

    def __init__(self, path: Path) -> None:
        with open_regular(path) as file:
            if file.seek(0, 2) == 0:
                raise ModelError(f"{path} is empty; download it again")
            super().__init__(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


class ReadFile:
    """The same interface over an open file: tensors are copies, which no later change of the file reaches."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self.path = file, path
        self.size = file.seek(0, 2)

    def bytes(self, start: int, stop: int) -> bytes:
        self._file.seek(start)
        return self._file.read(stop - start)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        out = torch.empty(shape, dtype=dtype)
        if out.numel():
            self._file.seek(offset)
            if self._file.readinto(out.view(-1).view(torch.uint8).numpy()) != out.nbytes:  # type: ignore[attr-defined]
                raise ModelError(f"{self.path} ended while it was read; another process writes to it")
        return out


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
