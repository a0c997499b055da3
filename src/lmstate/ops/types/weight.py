"""A matrix `[N, K]` (outputs, inputs) that multiplies activations, in one storage."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

FLOAT_KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Weight(ABC):
    """A matrix `[N, K]` that multiplies activations; see `FloatWeight`, `Int8Weight`, `Int4Weight`."""

    kind: str
    out_features: int
    in_features: int
    storage: Tensor
    """Tensor with the elements, in the layout of the kind."""
    activations: int | None = None
    """Bits of the activations that a quantized weight multiplies, 8 or 16; None where floats are multiplied."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32, first: int = 0, count: int | None = None) -> Tensor:
        """The matrix `[N, K]` as floats of `dtype`, or the outputs first..first + count of it."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` (int64, any shape) as float32 `[..., K]`: an embedding's lookup."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Tensors to store in a file; `weight_from_tensors(kind, shape, tensors)` is the way back."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Weight:
        """Copy to another device; itself if it is there."""

    def with_activations(self, bits: int) -> Weight:
        """Return the same elements for activations of `bits` bits (8 or 16); itself if its kind rounds none."""
        return self

    def in_large_pages(self) -> Weight:
        """Copy into large pages, which decoding reads faster; itself if its kind is not one to decode with."""
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """`(N, K)`."""
        return self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind} [{self.out_features}, {self.in_features}])"
