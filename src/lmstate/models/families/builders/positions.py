"""Tables of positions that are computed and not learned: sines, then cosines, of frequencies that fall."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmstate.errors import ModelError


def fairseq_sinusoids(count: int, width: int, padding: int | None) -> Tensor:
    """Of `count` positions as in fairseq, float32 `[count, E]`; that of padding is zero."""
    if width < 4:
        raise ModelError(f"sinusoidal positions need a width of at least 4; this model has {width}")
    half = width // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10_000) / (half - 1)))
    angles = torch.arange(count).float()[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos(), angles.new_zeros(count, width % 2)], dim=1)
    if padding is not None and padding < len(table):
        table[padding] = 0.0  # as transformers has it
    return table


def sinusoids(count: int, width: int) -> Tensor:
    """Of `count` positions as in the first transformer (1706.03762), float32 `[count, E]`."""
    angles = torch.arange(count).double()[:, None] / 10_000 ** (torch.arange(0, width, 2).double() / width)
    return torch.cat([angles.sin(), angles.cos()[:, : width // 2]], dim=1).float()
