"""One safetensors file: its header checked in full before a byte of it is used; and how one is written.

Format: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, then the data, whose
tensors are back to back (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lmstate.errors import ModelError
from lmstate.files.mmap_file import FileBuffer, MappedFile, ReadFile
from lmstate.files.tensor_header import damaged, header_of

MOST_DIMENSIONS = 8
MOST_ELEMENTS = 2**48

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U32": torch.uint32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorEntry:
    """Location of a tensor: `start` is a byte offset from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """A safetensors file. `entries` and `metadata` come from the header; `tensor(name)` maps.

    Raises `ModelError` for a file that lies about itself in any way, `OSError` for one that cannot be read.
    """

    def __init__(self, path: Path, file: FileBuffer | ReadFile | None = None) -> None:
        """`file`: how to read it; by default it is mapped."""
        self.path = path
        self._file = MappedFile(path) if file is None else file
        self.entries, self.metadata = self._read_header()

    def tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        return self._file.tensor(entry.start, entry.shape, entry.dtype)

    def _read_header(self) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        size = self._file.size
        header, metadata, data = header_of(self._file.bytes, size, self.path)
        entries, spans = {}, []
        for name, fields in header.items():
            dtype, shape, begin, end = self._entry(name, fields)
            entries[name] = TensorEntry(dtype, shape, data + begin)
            spans.append((begin, end, name))
        reached = 0
        for begin, end, name in sorted(spans):
            if begin != reached:
                raise self._damaged(f"tensor {name[:80]!r} begins at byte {begin} of the data instead of {reached}")
            reached = end
        if data + reached != size:
            raise self._damaged(f"its tensors end at byte {data + reached} and the file at {size}")
        return entries, metadata

    def _entry(self, name: str, fields: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        """dtype, shape, and the bytes [begin, end) of the data section, checked against one another."""
        shown = name[:80]
        if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
            raise self._damaged(f"the header's entry for {shown!r} lacks dtype, shape or data_offsets")
        dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
        if dtype is None:
            raise ModelError(
                f"{self.path}: tensor {shown!r} has a dtype that lmstate cannot read; it reads {', '.join(DTYPES)}"
            )
        shape, offsets = fields["shape"], fields["data_offsets"]
        if not (_whole_numbers(shape) and len(shape) <= MOST_DIMENSIONS):
            raise self._damaged(f"the shape of tensor {shown!r} is not a list of up to {MOST_DIMENSIONS} sizes")
        if not (_whole_numbers(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1] <= self._file.size):
            raise self._damaged(f"the data of tensor {shown!r} does not lie inside the file")
        needed = prod(shape) * dtype.itemsize
        # No extent alone makes an empty tensor's others harmless: torch computes strides of them.
        if needed != offsets[1] - offsets[0] or prod(max(extent, 1) for extent in shape) > MOST_ELEMENTS:
            raise self._damaged(f"tensor {shown!r} of shape {shape} does not fill the bytes that the header gives it")
        return dtype, tuple(shape), offsets[0], offsets[1]

    def _damaged(self, what: str) -> ModelError:
        return damaged(self.path, what)


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write contiguous tensors on the processor as a safetensors file. Raises `OSError`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    # The widest elements first, so that all are aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in ordered:
        if tensor.nbytes:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _whole_numbers(values: Any) -> bool:
    # No file is this large; the bound also keeps products of hostile sizes cheap.
    return isinstance(values, list) and all(type(value) is int and 0 <= value < MOST_ELEMENTS for value in values)
