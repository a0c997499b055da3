"""A GGUF file as a `Source`: Hugging Face names and config over ggml's, numbers taken apart when they are read."""

from __future__ import annotations

from dataclasses import astuple
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import HeadTiling, TensorLocation
from lmstate.checkpoints.gguf.blocks import FORMATS, PackedRows, take_apart
from lmstate.checkpoints.gguf.config import ROPE_TENSORS, config_of, locate
from lmstate.checkpoints.gguf.reader import GgufContents, TensorPlace, check_places, open_gguf, parts_of
from lmstate.checkpoints.gguf.tokenizer import generation_of, tokenizer_of
from lmstate.checkpoints.source import GROUP, GroupedQuant, RowTable, floats, part_of
from lmstate.errors import ModelError
from lmstate.files.mmap_file import MappedFile, fingerprint
from lmstate.text.tokenizer import TokenizerFiles


class GgufSource:
    """A `Source` over one .gguf file. `open` parses the file; `from_json` takes what a cache remembers of that
    instead."""

    weights = "auto"

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        generation: dict[str, Any],
        tensors: dict[str, TensorLocation],
        tokenizer: TokenizerFiles | None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self.notes = notes
        self.config = config
        self.generation = generation
        self._tensors = tensors
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, path: Path) -> GgufSource:
        files, contents = open_gguf(path)
        factors = {name: _floats(files, contents, name) for name in ROPE_TENSORS if name in contents.tensors}
        config = config_of(contents, factors, str(path))
        metadata = Config(contents.metadata, str(path))
        tensors = locate(contents, config, str(path))
        notes: list[str] = []
        tokenizer = tokenizer_of(metadata, notes)
        generation = generation_of(metadata, config["vocab_size"])
        return cls(path, config, generation, tensors, tokenizer, tuple(notes))

    @cached_property
    def conversions(self) -> tuple[str, ...]:
        """A line for each format that is not computed on as it is."""
        formats = [at.place.format for at in self._tensors.values() if len(at.place.shape) > 1]
        converted = {form: FORMATS[form] for form in formats if FORMATS[form].converted}
        return tuple(
            f"{formats.count(name)} matrices of {name} are dequantized and held as {form.kind}, the nearest storage"
            for name, form in converted.items()
        )

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def stored(self, name: str) -> str:
        return FORMATS[self._tensors[name].place.format].kind

    def activation_bits(self, name: str) -> int:
        return 8 if self.stored(name) in ("int4", "int8") else 16  # llama.cpp rounds them for every quantized format

    def read(self, name: str) -> Tensor | GroupedQuant:
        located = self._tensors[name]
        place, shape, offset = located.place, located.stored_shape, located.start
        form = FORMATS[place.format]
        if form.dtype is not None:
            plain = self._files[place.part].tensor(offset, shape, form.dtype)
            numbers: Tensor | GroupedQuant = plain if form.dtype.is_floating_point else plain.float()
        else:
            blocks = shape[-1] // form.numbers
            raw = self._files[place.part].tensor(offset, (*shape[:-1], blocks * form.nbytes), torch.uint8)
            numbers = take_apart(raw, place.format, shape[-1])
            _check_finite(numbers, name, self.path)
            if isinstance(numbers, Tensor) or len(shape) != 2:
                numbers = (numbers if isinstance(numbers, Tensor) else numbers.dequantize()).view(shape)
        if located.change is not None:
            numbers = self._undone(numbers, located, name)
        if located.paired_heads is not None:
            return _rows(numbers, _halves_from_pairs(shape[0], located.paired_heads))
        if located.tiled is not None:
            order = located.tiled.order(shape[-1] if located.tiled.columns else shape[0])
            return _columns(numbers, order) if located.tiled.columns else _rows(numbers, order)
        return numbers

    def part(self, name: str, index: int) -> Tensor:
        return part_of(self.read(name), index, self.path)

    def rows(self, name: str) -> RowTable:
        located = self._tensors[name]
        place, form = located.place, FORMATS[located.place.format]
        if form.dtype is not None:
            numbers = self.read(name)
            assert isinstance(numbers, Tensor)
            return numbers
        (count, columns) = located.stored_shape
        width = columns // form.numbers * form.nbytes
        return PackedRows(
            self._files[place.part].tensor(located.start, (count, width), torch.uint8), place.format, columns
        )

    def integers(self, name: str) -> Tensor:
        located = self._tensors.get(name)
        dtype = None if located is None else FORMATS[located.place.format].dtype
        if located is None or dtype is None or dtype.is_floating_point:
            raise ModelError(f"{self.path} lacks the whole numbers {name!r}; the file is incomplete")
        numbers = self._files[located.place.part].tensor(located.start, located.stored_shape, dtype).long()
        if located.change != "token ids":
            return numbers
        if numbers.dim() != 1:
            raise ModelError(f"{self.path}: {name!r} has the shape {list(numbers.shape)}; expected a list of token ids")
        return numbers - torch.arange(len(numbers))

    def _undone(self, numbers: Tensor | GroupedQuant, located: TensorLocation, name: str) -> Tensor:
        """A small tensor as it was before the converter changed it."""
        whole = floats(numbers)
        if located.change in ("decay", "decay vector"):
            if not bool((whole < 0).all()):
                raise ModelError(f"{self.path} is damaged: the rates of decay in {name!r} must be negative")
            whole = whole.float().neg().log()
        if located.change == "rate":
            if not bool((whole > 0).all()):
                raise ModelError(f"{self.path} is damaged: the rates in {name!r} must be positive")
            whole = whole.float().log()
        if located.change == "one more":
            whole = whole.float() - 1.0
        return whole.reshape(located.shape)

    def key(self) -> str:
        return fingerprint(parts_of(self.path))

    def tokenizer_files(self) -> TokenizerFiles | None:
        return self._tokenizer

    def to_json(self) -> dict[str, Any]:
        """JSON values that `from_json` reads: everything but the tokenizer."""
        tensors = {
            name: [
                *(
                    at.place.part,
                    at.place.start,
                    list(at.place.shape),
                    at.place.format,
                    at.expert,
                    at.paired_heads,
                    at.change,
                ),
                at.tiled and astuple(at.tiled),
                at.rows,
            ]
            for name, at in self._tensors.items()
        }
        return {
            "config": self.config,
            "generation": self.generation,
            "tensors": tensors,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, path: Path, memory: dict[str, Any], tokenizer: TokenizerFiles | None) -> GgufSource:
        tensors = {
            name: TensorLocation(
                *(TensorPlace(tuple(shape), format_, start, part), expert, heads, change),
                *(tiled and HeadTiling(*tiled), rows and tuple(rows)),
            )
            for name, (part, start, shape, format_, expert, heads, change, tiled, rows) in memory["tensors"].items()
        }
        return cls(path, memory["config"], memory["generation"], tensors, tokenizer, tuple(memory["notes"]))

    @cached_property
    def _files(self) -> list[MappedFile]:
        files = [MappedFile(part) for part in parts_of(self.path)]
        # Again, although parsing checked: a file may have been cut since, and reading past a mapping's end kills.
        places = {at.place for at in self._tensors.values()}
        for index, file in enumerate(files):
            check_places({str(place.start): place for place in places if place.part == index}, file)
        return files


def _floats(files: list[MappedFile], contents: GgufContents, name: str) -> list[float]:
    place = contents.tensors[name]
    file = files[place.part]
    dtype = FORMATS[place.format].dtype
    if dtype is None or len(place.shape) != 1 or place.shape[0] > 65536:
        raise ModelError(f"{file.path}: tensor {name!r} is {place.format} of shape {place.shape}, not a list of floats")
    values = file.tensor(place.start, place.shape, dtype).float()
    if not bool((values.isfinite() & (values > 0)).all()):
        raise ModelError(f"{file.path}: tensor {name!r} must hold positive numbers")
    return [float(value) for value in values]


def _check_finite(numbers: Tensor | GroupedQuant, name: str, path: Path) -> None:
    parts = [numbers] if isinstance(numbers, Tensor) else [numbers.scale, numbers.minimum]
    if not all(part is None or bool(part.isfinite().all()) for part in parts):
        raise ModelError(f"{path} is damaged: the scales of tensor {name!r} hold infinities or NaN")


def _rows(numbers: Tensor | GroupedQuant, order: Tensor) -> Tensor | GroupedQuant:
    return numbers.rows(order) if isinstance(numbers, GroupedQuant) else numbers[order]


def _columns(numbers: Tensor | GroupedQuant, order: Tensor) -> Tensor | GroupedQuant:
    """A matrix with its columns in another order; it stays quantized where whole groups keep together."""
    if isinstance(numbers, GroupedQuant):
        groups = order.view(-1, GROUP)
        first = groups[:, :1]
        if bool((first % GROUP == 0).all()) and torch.equal(groups, first + torch.arange(GROUP)):
            return numbers.groups(first[:, 0] // GROUP)
        numbers = numbers.dequantize()
    return numbers[..., order]


def _halves_from_pairs(rows: int, heads: int) -> Tensor:
    """Index in the file of each row of a q or k projection in Hugging Face's order, int64 [rows].

    ggml's rope turns neighboring rows (2i, 2i+1) of a head, Hugging Face's the rows (i, i + D/2).
    """
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(rows)
