"""The GGUF container: metadata and the table of tensors, parsed with every length checked before it is believed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. No list is begun
whose smallest possible content is larger than the rest of the file, so time and memory are bounded by the file's size.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmstate.checkpoints.gguf.blocks import FORMATS
from lmstate.errors import ModelError
from lmstate.files.mmap_file import MappedFile

MOST_TENSORS, MOST_KEYS, MOST_ITEMS = 2**17, 2**16, 2**23
MOST_DIMENSIONS, MOST_EXTENT = 4, 2**40
STRING, ARRAY = 8, 9
PART, MOST_PARTS = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf"), 4096
# type id -> struct code: u8 i8 u16 i16 u32 i32 f32 bool, u64 i64 f64
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of a GGUF file. `shape` is outermost first, as torch has it (the file has it reversed)."""

    shape: tuple[int, ...]
    format: str  # a key of gguf_blocks.FORMATS
    start: int  # byte offset from the beginning of the file
    part: int = 0  # which of the files of a model that is split

    @property
    def nbytes(self) -> int:
        numbers = 1
        for extent in self.shape:
            numbers *= extent
        return numbers // FORMATS[self.format].numbers * FORMATS[self.format].nbytes


@dataclass(frozen=True)
class GgufContents:
    """Header of a GGUF file, or of the files of a model that is split: metadata and the places of the tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]


class BufferReader:
    """Reads forward through a buffer; running past its end is a `ModelError`, not an exception of struct."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self._buffer = file.buffer
        self.size = file.size
        self.at = 0

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged or incomplete: {what}. Download it again")

    def number(self, code: str) -> Any:
        length = struct.calcsize("<" + code)
        if length > self.size - self.at:
            raise self.damaged(f"it ends at byte {self.size}, in the middle of its header")
        (value,) = struct.unpack_from("<" + code, self._buffer, self.at)
        self.at += length
        return value

    def count(self, what: str, smallest: int, most: int) -> int:
        """A 64-bit count of things that take at least `smallest` bytes each."""
        count = int(self.number("Q"))
        if count > most or count * smallest > self.size - self.at:
            raise self.damaged(f"it claims {count} {what}, which cannot be in its {self.size} bytes")
        return count

    def string(self) -> str:
        length = self.number("Q")
        if length > self.size - self.at:
            raise self.damaged(f"a string of {length} bytes begins at byte {self.at} of {self.size}")
        raw = self._buffer[self.at : self.at + length]
        self.at += length
        # Token strings of byte-fallback vocabularies may hold broken UTF-8; such a token can never be matched anyway.
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise self.damaged(f"it has a metadata value of unknown type {kind}")
        return self.number(SCALARS[kind])

    def _array(self) -> list[Any]:
        kind = self.number("I")
        if kind == ARRAY:
            raise self.damaged("its metadata nests arrays in arrays")
        if kind == STRING:
            return [self.string() for _ in range(self.count("strings", 8, MOST_ITEMS))]
        if kind not in SCALARS:
            raise self.damaged(f"it has a metadata array of unknown type {kind}")
        code = SCALARS[kind]
        count = self.count("numbers", struct.calcsize("<" + code), MOST_ITEMS)
        values = struct.unpack_from(f"<{count}{code}", self._buffer, self.at)
        self.at += struct.calcsize(f"<{count}{code}")
        return list(values)


def parse(file: MappedFile) -> GgufContents:
    """Metadata and tensor table of a mapped GGUF file. Raises `ModelError` for anything that does not add up."""
    cursor = BufferReader(file)
    if file.buffer[:4] != b"GGUF":
        raise ModelError(f"{file.path} is not a GGUF file: it does not begin with the letters GGUF")
    if file.size < 24:
        raise cursor.damaged(f"it has {file.size} bytes")
    cursor.at = 4
    version = cursor.number("I")
    if version not in (2, 3):
        raise ModelError(f"{file.path} is GGUF version {version}; lmstate reads versions 2 and 3, little-endian")
    tensor_count = cursor.count("tensors", 24, MOST_TENSORS)
    key_count = cursor.count("metadata values", 13, MOST_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        name = cursor.string()
        if name in metadata:
            raise cursor.damaged(f"it gives {name[:80]!r} twice")
        metadata[name] = cursor.value(cursor.number("I"))
    places = [_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise cursor.damaged(f"its alignment is {str(alignment)[:40]}, and must be a power of two")
    begin = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorPlace] = {}
    for name, shape, format_, offset in places:
        if name in tensors:
            raise cursor.damaged(f"it has two tensors named {name[:80]!r}")
        if offset % alignment:
            raise cursor.damaged(f"tensor {name[:80]!r} lies at offset {offset}, no multiple of {alignment}")
        tensors[name] = TensorPlace(shape, format_, begin + offset)
    check_places(tensors, file)
    return GgufContents(metadata, tensors)


def _tensor(cursor: BufferReader) -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.string()
    shown = name[:80]
    rank = cursor.number("I")
    if not 1 <= rank <= MOST_DIMENSIONS:
        raise cursor.damaged(f"tensor {shown!r} claims {rank} dimensions; GGUF has 1 to {MOST_DIMENSIONS}")
    shape = tuple(int(cursor.number("Q")) for _ in range(rank))[::-1]
    if not all(1 <= extent <= MOST_EXTENT for extent in shape):
        raise cursor.damaged(f"tensor {shown!r} claims the shape {shape}")
    type_id, offset = cursor.number("I"), cursor.number("Q")
    format_ = next((key for key, value in FORMATS.items() if value.type_id == type_id), None)
    if format_ is None:
        raise ModelError(
            f"{cursor.path}: tensor {shown!r} is stored as ggml type {type_id}, which lmstate cannot read; "
            f"it reads {', '.join(FORMATS)}"
        )
    if shape[-1] % FORMATS[format_].numbers:
        raise cursor.damaged(f"rows of tensor {shown!r} have {shape[-1]} numbers, which {format_} blocks cannot hold")
    return name, shape, format_, offset


def check_places(tensors: dict[str, TensorPlace], file: MappedFile) -> None:
    """Every tensor inside the file and none on top of another, or `ModelError`."""
    reached = 0
    for name, place in sorted(tensors.items(), key=lambda item: item[1].start):
        if place.start < reached:
            raise ModelError(f"{file.path} is damaged: tensor {name[:80]!r} lies on top of another one")
        reached = place.start + place.nbytes
        if reached > file.size:
            raise ModelError(
                f"{file.path} is damaged or incomplete: tensor {name[:80]!r} ends at byte {reached} and the file at "
                f"{file.size}. Download it again"
            )


def parts_of(path: Path) -> list[Path]:
    """The files of a model, of which `path` is one: all of `NAME-00001-of-0000N.gguf`, or `path` alone.

    Raises `FileNotFoundError` for parts that are missing.
    """
    match = PART.fullmatch(path.name)
    if match is None or not 1 < int(match[3]) <= MOST_PARTS:
        return [path]
    parts = [path.with_name(name) for name in part_names(path.name)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise FileNotFoundError(f"{path} is one of {len(parts)} files of a model; {path.parent} lacks {shown}")
    return parts


def part_names(name: str) -> list[str]:
    """The names of all the files of a model, of which `name` is one; itself alone where it is not a part."""
    match = PART.fullmatch(name)
    if match is None or int(match[3]) > MOST_PARTS:
        return [name]
    return [f"{match[1]}-{index + 1:05d}-of-{match[3]}.gguf" for index in range(int(match[3]))]


def open_gguf(path: Path) -> tuple[list[MappedFile], GgufContents]:
    """Open a model: the file, or all the files of a model that is split, and what they hold together."""
    files = [MappedFile(part) for part in parts_of(path)]
    contents = [parse(file) for file in files]
    for index, (file, each) in enumerate(zip(files, contents)):
        number, count = each.metadata.get("split.no", 0), each.metadata.get("split.count", 0) or 1
        if (number, count) != (index, len(files)):
            raise ModelError(
                f"{file.path} says that it is part {number} (from 0 on) of {count}, and its name says {index} of "
                f"{len(files)}. Give the files of a split model their names back: NAME-00001-of-0000N.gguf"
            )
    tensors: dict[str, TensorPlace] = {}
    for index, each in enumerate(contents):
        for name, place in each.tensors.items():
            if name in tensors:
                raise ModelError(f"{path} is damaged: two of its files have a tensor named {name[:80]!r}")
            tensors[name] = replace(place, part=index)
    metadata = contents[0].metadata
    told = metadata.get("split.tensors.count", len(tensors))
    if len(files) > 1 and told != len(tensors):
        raise ModelError(f"{path} is damaged: its files hold {len(tensors)} tensors, and should hold {told}")
    return files, GgufContents(metadata, tensors)
