"""Storage policies for keys and values: floats, or a few bits an element. They keep every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmstate.errors import StateError
from lmstate.state.layers.base import Policy
from lmstate.state.validate import whole_number


class Storage(Policy):
    """Storage of the slots of an attention layer."""


@dataclass(frozen=True)
class Dense(Storage):
    """As floats of `dtype`; by default those of the state."""

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise StateError(
                f"Dense(dtype={self.dtype!r}) was asked for; there are torch.bfloat16, float16, float32 and float64, "
                "and Quantized(8) for fewer bits"
            )


@dataclass(frozen=True)
class Quantized(Storage):
    """In 8, 4, 3 or 2 bits an element; each token is quantized once.

    Keys and values go through an orthogonal transform first (Hadamard; as in QuaRot, 2404.00456), so that no channel
    stands out, with a scale per token and head. Keys of 4 bits or fewer have a scale and a zero point for each channel
    of 64 positions instead (KIVI, 2402.02750). Until these are complete, the newest keys are kept as floats. Under a
    policy that evicts, keys are stored as values are. Latents have scales for at most 64 elements of a token.
    `ops.types.kv_format` says what is stored.
    """

    bits: int = 8

    def __post_init__(self) -> None:
        if whole_number(self.bits, "bits of Quantized") not in (8, 4, 3, 2):
            raise StateError(f"Quantized(bits={self.bits}) was asked for; there are 8, 4, 3 and 2")
