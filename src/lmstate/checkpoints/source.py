"""The interface of every checkpoint format: a config, Hugging Face tensor names, and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lmstate.errors import ModelError
from lmstate.text.tokenizer import TokenizerFiles

GROUP = 32  # quantized matrices share one scale among this many neighbors along the input axis


@dataclass(frozen=True)
class GroupedQuant:
    """A matrix [N, K] as small integers in groups of 32 along K: `w = scale * q + minimum`, exactly as the file has it.

    `q`: uint8 in 0..15 with a minimum (int4), int8 without (int8), [N, K]. `scale`, `minimum`: float32 [N, K/32].
    """

    q: Tensor
    scale: Tensor
    minimum: Tensor | None

    @property
    def kind(self) -> str:
        return "int8" if self.minimum is None else "int4"

    def dequantize(self) -> Tensor:
        """float32 [N, K]"""
        rows, columns = self.q.shape
        groups = self.q.view(rows, columns // GROUP, GROUP).float() * self.scale.unsqueeze(-1)
        if self.minimum is not None:
            groups += self.minimum.unsqueeze(-1)
        return groups.view(rows, columns)

    def rows(self, order: Tensor) -> GroupedQuant:
        """Permute the rows of the matrix."""
        return GroupedQuant(self.q[order], self.scale[order], None if self.minimum is None else self.minimum[order])

    def groups(self, order: Tensor) -> GroupedQuant:
        """Permute groups of 32 columns of the matrix: int64 `[K/32]`."""
        q = self.q.view(len(self.q), -1, GROUP)[:, order].flatten(1)
        return GroupedQuant(q, self.scale[:, order], None if self.minimum is None else self.minimum[:, order])


class RowTable(Protocol):
    """A matrix `[N, K]` of which few rows are read at a time, where it is. A float tensor is one."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        """Rows of these numbers, int64 `[M]` -> floats `[M, K]`."""
        ...


def floats(numbers: Tensor | GroupedQuant) -> Tensor:
    """The floats that a file has, or that its integers stand for."""
    return numbers.dequantize() if isinstance(numbers, GroupedQuant) else numbers


def part_of(numbers: Tensor | GroupedQuant, index: int, path: Path) -> Tensor:
    """One of the tensors that are stacked in one."""
    if isinstance(numbers, GroupedQuant):
        raise ModelError(f"{path}: a quantized matrix was found where one per expert should be")
    return numbers[index]


class Source(Protocol):
    """An open checkpoint. Tensor names are those of Hugging Face, whatever the file calls them."""

    path: Path
    config: dict[str, Any]  # as in config.json
    generation: dict[str, Any]  # as in generation_config.json
    notes: tuple[str, ...]  # what the files leave out or have wrong, and what was guessed; a warning each

    weights: str  # the storage that weights="auto" stands for, where the checkpoint says one; else "auto"

    def activation_bits(self, name: str) -> int:
        """Default bits of the activations that a tensor multiplies where it is held quantized."""
        ...

    @property
    def conversions(self) -> tuple[str, ...]:
        """Tensors held in another storage than the files', a line of the log each."""
        ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored(self, name: str) -> str:
        """The storage that comes closest to what the file has: int4, int8, float16, bfloat16 or float32."""
        ...

    def read(self, name: str) -> Tensor | GroupedQuant:
        """A float tensor in the file's dtype, or the integers of a quantized matrix. May be in the mapped file."""
        ...

    def part(self, name: str, index: int) -> Tensor:
        """One of the tensors that are stacked in one, without work for the others where the file allows it."""
        ...

    def rows(self, name: str) -> RowTable:
        """A matrix of which few rows are read at a time. It stays in the mapped file, quantized or not."""
        ...

    def key(self) -> str:
        """Identifies the content, cheaply; names the folder of the cache."""
        ...

    def tokenizer_files(self) -> TokenizerFiles | None:
        """Files of the tokenizer; None for a checkpoint without one."""
        ...


class IntegerSource(Source, Protocol):
    """A checkpoint that also has tensors of whole numbers: the maps between the tokens of a drafter and a model."""

    def integers(self, name: str) -> Tensor:
        """A tensor of whole numbers, int64. Raises `ModelError` where there is none of that name."""
        ...


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
