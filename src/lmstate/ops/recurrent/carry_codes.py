"""Carries in few bits: groups of 32 numbers with one scale, as in MXINT8 of the OCP Microscaling Formats 1.0.

A scale is the power of two of the largest number of its group. It is stored as the exponent of a float32; 255 stands
for numbers that are not finite. A code counts parts of 2^-6 of that power in 8 bits, as in MXINT8, and of 2^-14 in 16.

A number is rounded up or down by a threshold, so that the errors of many roundings cancel: a recurrence that changes
slowly would not change at all if each went to the nearest code. The threshold depends on the number's place in its row
and on how often the row was rounded before. It is the fraction of the R2 sequence of Roberts (2018), which is even
over both. A number that codes give is rounded to itself under every threshold. So rounding again changes no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
NOT_FINITE = 255  # as the exponent of a float32
OF_PLACE, OF_TURN = 3242174889, 2447445413  # 2^32 times the two steps of the R2 sequence
THRESHOLDS = 256


def carry_codes(x: Tensor, bits: int, turns: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Codes int8 or int16 `[R, ...]` and scales uint8 `[R, G]` of numbers float32 `[R, ...]`.

    turns: int64 `[R]`, how often each row was rounded before. first: the place of a row's first number, where `x` is a
    part of longer rows; a multiple of 32.
    """
    groups = _grouped(x)
    least = bits - 1  # so that the smallest codes are normal numbers
    scales = (groups.abs().amax(-1).view(torch.int32) >> 23).clamp(min=least)
    places = (first + torch.arange(groups[0].numel(), device=x.device)) * OF_PLACE
    drawn = (places + turns.to(x.device)[:, None] * OF_TURN & 0xFFFFFFFF) * THRESHOLDS >> 32
    thresholds = (drawn.float() + 0.5) / THRESHOLDS  # below 1, and exact beside a code of 16 bits
    most = 2 ** (bits - 1) - 1
    codes = (groups / _units(scales, bits) + thresholds.view_as(groups)).floor().clamp(-most, most)
    codes = codes.masked_fill((scales == NOT_FINITE)[..., None], 0).to(torch.int8 if bits == 8 else torch.int16)
    return _ungrouped(codes, x.shape), scales.to(torch.uint8)


def carry_numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers float32 `[R, ...]` that codes `[R, ...]` and scales `[R, G]` stand for: NaN where not finite."""
    scales = scales.int()
    numbers = _grouped(codes.float()) * _units(scales, 8 * codes.element_size())
    numbers = numbers.masked_fill((scales == NOT_FINITE)[..., None], torch.nan)
    return _ungrouped(numbers, codes.shape)


def scales_of(count: int) -> int:
    """G: the number of scales of a row of `count` numbers."""
    return -(-count // GROUP)


def _grouped(x: Tensor) -> Tensor:
    """`[R, ...]` -> `[R, G, 32]`, with zeros after a row's last number."""
    flat = x.flatten(1)
    return torch.nn.functional.pad(flat, (0, -flat.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def _ungrouped(groups: Tensor, shape: torch.Size) -> Tensor:
    """The inverse, in memory of its own."""
    flat, count = groups.flatten(1), shape[1:].numel()
    return (flat if flat.shape[1] == count else flat[:, :count].clone()).view(shape)


def _units(scales: Tensor, bits: int) -> Tensor:
    """The number that a code of 1 stands for, float32 `[R, G, 1]`. scales: int32 `[R, G]`."""
    return ((scales - (bits - 2)).clamp(min=1) << 23).view(torch.float32)[..., None]
