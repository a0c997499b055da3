"""Sources beside texts: vectors of numbers, as the frames of a sound, which the encoder of a model reads."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lmstate.errors import SnapshotError, StateError

SHA256 = re.compile("[0-9a-f]{64}")
FARTHEST = 2**31


@dataclass(frozen=True)
class SourceFeatures:
    """A source of N vectors of F numbers, as a model's encoder reads them. Made by `SourceFeatures.of`.

    A value: nothing changes `values`, float32 `[N, F]`; None where the source was read and they were let go. `hash` is
    their SHA-256, so that two of the same hash are the same to a model. Its length is N.
    """

    hash: str
    shape: tuple[int, int]
    values: Tensor | None = field(compare=False, repr=False)

    @staticmethod
    def of(values: Tensor) -> SourceFeatures:
        """The source of float32 `[N, F]`. Raises `StateError` for anything else, and where a number is not finite."""
        if not isinstance(values, Tensor) or values.ndim != 2 or not values.is_floating_point() or not values.numel():
            shown = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else f"{values!r:.80}"
            raise StateError(f"features of a source are {shown}; they are float32 [N, F]")
        values = values.detach().cpu().float().contiguous()
        if not bool(values.isfinite().all()):
            raise StateError("features of a source have numbers that are not finite")
        count, width = values.shape
        digest = hashlib.sha256(f"{count} {width}\n".encode())
        digest.update(values.view(-1).view(torch.uint8).numpy().data)
        return SourceFeatures(digest.hexdigest(), (count, width), values)

    def __len__(self) -> int:
        return self.shape[0]

    def without_values(self) -> SourceFeatures:
        return replace(self, values=None)

    def to_json(self) -> str:
        """The source without its values, for a file."""
        return json.dumps([self.hash, *self.shape])

    @staticmethod
    def from_json(where: object, text: str) -> SourceFeatures:
        """Inverse of `to_json`. Raises `SnapshotError` for a damaged one."""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        kinds = tuple(map(type, record)) if isinstance(record, list) else ()
        found = SourceFeatures(record[0], (record[1], record[2]), None) if kinds == (str, int, int) else None
        if found is None or not found.whole:
            raise SnapshotError(f"{where} is damaged: its record of a source is malformed")
        return found

    @property
    def whole(self) -> bool:
        """Whether its fields are of the kinds and sizes that `of` gives."""
        sizes = isinstance(self.shape, tuple) and len(self.shape) == 2 and set(map(type, self.shape)) == {int}
        hashed = isinstance(self.hash, str) and SHA256.fullmatch(self.hash) is not None
        return hashed and sizes and all(0 < size < FARTHEST for size in self.shape)

    def __deepcopy__(self, memo: object) -> SourceFeatures:
        return self


Source: TypeAlias = "tuple[int, ...] | SourceFeatures"
"""The source of a row, as it is kept: the ids of a text, or features without their values."""


def named(source: Source) -> Any:
    """The ids or the hash that tell a source from others."""
    return source.hash if isinstance(source, SourceFeatures) else list(source)
