"""The header of a safetensors file as JSON, within bounds. Nothing here imports torch."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmstate.errors import ModelError
from lmstate.files.json_object import parse_object
from lmstate.files.regular import open_regular

MOST_HEADER_BYTES = 100 * 10**6  # the format's own limit


def header_of(read: Callable[[int, int], bytes], size: int, path: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    """The entries of the tensors, not checked yet; the metadata; and the byte at which the data begin.

    read: gives the bytes [start, stop) of the file, which has `size`. Raises `ModelError` for a header that is not one.
    """
    if size < 10:
        raise damaged(path, f"it has only {size} bytes")
    (length,) = struct.unpack("<Q", read(0, 8))
    if not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
        raise damaged(path, f"its header claims {length} bytes and the file has {size}")
    entries = parse_object(read(8, 8 + length), f"the header of {path}")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(path, "its metadata is not a table of strings")
    return entries, metadata, 8 + length


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a file. Raises `OSError` if it cannot be read, `ModelError` for a header that is not one."""
    with open_regular(path) as file:

        def read(start: int, stop: int) -> bytes:
            file.seek(start)
            return file.read(stop - start)

        return header_of(read, file.seek(0, 2), path)[1]


def damaged(path: Path, what: str) -> ModelError:
    """The error for a file that says of itself what cannot be."""
    return ModelError(f"{path} is damaged or incomplete: {what}. Make or download it again")
