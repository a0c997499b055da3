"""Files of layers: a safetensors file of named tensors and metadata, checksummed, and checked before it is believed."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from lmstate.errors import ModelError, SnapshotError
from lmstate.files.atomic import atomic_write
from lmstate.files.mmap_file import MappedFile, ReadFile
from lmstate.files.regular import open_regular
from lmstate.files.safetensors import TensorFile, write_tensors

MOST_TOKENS = 2**31
CHECKSUMS = "checksums"


class VersionError(SnapshotError):
    """A file is of another version of its format, and may be sound."""


def write_layers(path: str | os.PathLike[str], metadata: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Write a file, whole or not at all. Raises `OSError`."""
    with atomic_write(Path(path)) as part, part.open("wb") as file:
        dump_layers(file, metadata, tensors)


def dump_layers(file: BinaryIO, metadata: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Write tensors and metadata with the CRC-32 of each."""
    metadata = {name: text for name, text in metadata.items() if name != CHECKSUMS}
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sums = {name: _checksum(tensor) for name, tensor in whole.items()}
    write_tensors(file, whole, {**metadata, CHECKSUMS: json.dumps([_checksum_of(metadata), sums])})


def read_layers(
    path: Path, format_: str, version: int, what: str, *, mmap: bool = False
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file that `write_layers` wrote in this format and version, checksums verified.

    The file is opened once. The tensors are copies; with `mmap` they are in the mapped file, which must then stay as it
    is. Raises `SnapshotError` if it is damaged or no `what`, `OSError` if unreadable.
    """
    try:
        if mmap:
            return _read(TensorFile(path, MappedFile(path)), format_, version, what)
        with open_regular(path) as file:
            return _read(TensorFile(path, ReadFile(file, path)), format_, version, what)
    except ModelError as error:
        raise SnapshotError(f"{path} is damaged, or no {what}: {error}") from error


def _read(file: TensorFile, format_: str, version: int, what: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    path, metadata = file.path, file.metadata
    if metadata.get("format") != format_:
        raise SnapshotError(f"{path} is a safetensors file, but no {what}")
    if metadata.get("version") != str(version):
        raise VersionError(
            f"{path} is a {what} of version {metadata.get('version')!r}; this lmstate reads version {version}"
        )
    rest = {name: text for name, text in metadata.items() if name != CHECKSUMS}
    tensors = {name: file.tensor(name) for name in file.entries}
    sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    try:
        written = json.loads(metadata.get(CHECKSUMS, ""))
    except (ValueError, RecursionError):
        written = None
    if written != [_checksum_of(rest), sums]:
        known = written[1] if isinstance(written, list) and len(written) == 2 else None
        bad = [name for name in sums if isinstance(known, dict) and known.get(name) != sums[name]]
        where = f"the tensor {bad[0][:80]!r} is" if bad else "its metadata is"
        raise SnapshotError(f"{path} is damaged: {where} not what was written, by the checksums in it")
    return metadata, tensors


def _checksum(tensor: Tensor) -> str:
    """CRC-32 of dtype, shape and content."""
    start = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    content = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return f"{zlib.crc32(content, start):08x}"  # type: ignore[arg-type]


def _checksum_of(metadata: dict[str, str]) -> str:
    return f"{zlib.crc32(json.dumps(sorted(metadata.items())).encode()):08x}"


def by_layer(path: Path, tensors: dict[str, Tensor], count: int) -> tuple[dict[str, Tensor], ...]:
    """The tensors `layers.{index}.{name}` of each of `count` layers; any other tensor is an error."""
    layers: tuple[dict[str, Tensor], ...] = tuple({} for _ in range(count))
    for name, tensor in tensors.items():
        start, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        counted = number.isascii() and number.isdecimal() and len(number) < 12
        if start != "layers" or not counted or int(number) >= count or not part:
            raise SnapshotError(f"{path} holds a tensor {name[:80]!r} that belongs to no layer")
        layers[int(number)][part] = tensor
    return layers


def metadata_number(path: Path, metadata: dict[str, str], name: str, most: int) -> int:
    """A whole number up to `most` in the metadata. Raises `SnapshotError` for anything else."""
    text = metadata.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) <= most):
        raise SnapshotError(f"{path} says {name}={text[:40]!r}; it must be a number up to {most}")
    return int(text)
