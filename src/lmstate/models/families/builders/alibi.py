"""Slopes of heads that know positions by distance alone."""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(heads: int, most: float = 8.0) -> Tensor:
    """The slopes of ALiBi (2108.12409), float32 `[H]`: powers of 2 down to `2 ** -most`.

    They are those of the next power of two heads, every second one first, as many as there are heads.
    """
    whole = 1 << (heads - 1).bit_length()
    slopes = torch.exp2(-torch.arange(1, whole + 1, dtype=torch.float64) * (most / whole)).float()
    return slopes if whole == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]
