"""MXFP4 (OCP microscaling formats 1.0): groups of 32 four-bit floats that share a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.checkpoints.source import GroupedQuant

# The sixteen values of a 1-2-1 bit float (sign, exponent, mantissa), doubled: whole numbers.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

PARTS = ("_blocks", "_scales")
"""Endings of the names of its tensors, which hold bytes."""


def take_apart(blocks: Tensor, scales: Tensor) -> GroupedQuant:
    """Blocks uint8 `[N, K / 32, 16]` and exponents uint8 `[N, K / 32]` as int8 groups: the same numbers, exactly.

    The low half of a byte comes before its high half.
    """
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1)  # [N, K / 32, 16, 2]
    return GroupedQuant(whole_numbers(nibbles.flatten(1)), scale(scales), None)


def whole_numbers(nibbles: Tensor) -> Tensor:
    """The int8 that is twice each four-bit float."""
    return torch.tensor(DOUBLED, dtype=torch.int8)[nibbles.long()]


def scale(exponents: Tensor) -> Tensor:
    """Scale of doubled values, float32: an exponent e stands for 2 ** (e - 127)."""
    return torch.exp2(exponents.float() - 128.0)
