"""MXFP4 (OCP microscaling formats 1.0): groups of 32 four-bit floats that share a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.models.weights.source import GroupedQuant

# The sixteen values of a 1-2-1 bit float (sign, exponent, mantissa), doubled: whole numbers.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def take_apart(blocks: Tensor, scales: Tensor) -> GroupedQuant:
    """Blocks uint8 `[N, K / 32, 16]` and exponents uint8 `[N, K / 32]` as int8 groups: the same numbers, exactly.

    The low half of a byte comes before its high half. An exponent e stands for 2 ** (e - 127).
    """
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1)  # [N, K / 32, 16, 2]
    q = torch.tensor(DOUBLED, dtype=torch.int8)[nibbles.long()].flatten(1)  # [N, K]
    return GroupedQuant(q, torch.exp2(scales.float() - 128.0), None)
