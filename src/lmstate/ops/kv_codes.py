"""Keys and values in a few bits a number: what codes, scales and lows stand for.

Of a vector: 8 bits: `x = scale * code`, codes int8. 4 and 2 bits: `x = scale * code + low`, 2 or 4 codes in a byte:
number i of the n of a vector is field `i // (n * bits / 8)` of byte `i % (n * bits / 8)`, the lowest bits first. Long
vectors are cut into groups with a scale each. Scales and lows are float16, those of a vector side by side: all its
scales, then all its lows.

Of a block of `BLOCK` positions: the same with a scale and a low for each channel, which lie across the block's slots.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 64
"""Numbers of a vector that share a scale, at most, where nothing else is said."""
BLOCK = 64
"""Positions whose keys share a channel's scale."""
LARGEST = 65504.0  # of float16


def group_of(dim: int, bits: int, most: int = GROUP) -> int:
    """How many numbers of a vector of `dim` share a scale: the largest part of it up to `most` that fills bytes."""
    for parts in range(1, dim + 1):
        if dim % parts == 0 and dim // parts <= most and dim // parts * bits % 8 == 0:
            return dim // parts
    raise ValueError(f"vectors of {dim} numbers cannot be stored in {bits} bits each, only those that fill bytes")


def widths(dim: int, bits: int, most: int = GROUP) -> tuple[int, int]:
    """What a vector of `dim` numbers takes: bytes of codes, and numbers of float16."""
    return dim * bits // 8, dim // group_of(dim, bits, most) * (1 if bits == 8 else 2)


def code_dtype(bits: int) -> torch.dtype:
    return torch.int8 if bits == 8 else torch.uint8


def encode(x: Tensor, bits: int, most: int = GROUP) -> tuple[Tensor, Tensor]:
    """x `[..., D]` -> codes `[..., D * bits / 8]` and float16 scales `[..., n]`."""
    groups = x.detach().float().unflatten(-1, (-1, group_of(x.shape[-1], bits, most)))  # [..., n, group]
    if bits == 8:
        scale = (groups.abs().amax(-1) / 127).clamp(max=LARGEST).half()
        codes = (groups / _divisor(scale)).round_().clamp_(-127, 127).to(torch.int8)
        return codes.flatten(-2), scale
    codes, scale, low = _codes(groups, bits)
    return packed(codes, bits).flatten(-2), torch.cat([scale, low], dim=-1)


def decode(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `encode` gave -> `[..., D]`."""
    if bits == 8:
        groups = codes.unflatten(-1, (scales.shape[-1], -1)).to(torch.float32)
        return (groups * scales[..., None].float()).flatten(-2).to(dtype)
    scale, low = scales.float().unsqueeze(-1).chunk(2, dim=-2)  # [..., n, 1]
    groups = unpacked(codes.unflatten(-1, (scale.shape[-2], -1)), bits).to(torch.float32)
    return torch.addcmul(low, groups, scale).flatten(-2).to(dtype)


def block_scales(dim: int) -> int:
    """Numbers of float16 that a slot holds of its block's scales and lows."""
    return -(-2 * dim // BLOCK)


def encode_blocks(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x `[..., n * BLOCK, D]` -> codes `[..., n * BLOCK, D * bits / 8]`, scales `[..., n * BLOCK, block_scales(D)]`."""
    channels = x.detach().float().unflatten(-2, (-1, BLOCK)).mT  # [..., n, D, BLOCK]
    codes, scale, low = _codes(channels, bits)
    both = torch.cat([scale, low], dim=-1)  # [..., n, 2 D]
    room = BLOCK * block_scales(x.shape[-1])
    spread = F.pad(both, (0, room - both.shape[-1])).unflatten(-1, (BLOCK, -1))
    return packed(codes.mT, bits).flatten(-3, -2), spread.flatten(-3, -2)


def decode_blocks(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `encode_blocks` gave -> `[..., n * BLOCK, D]`."""
    numbers = unpacked(codes, bits).unflatten(-2, (-1, BLOCK)).to(torch.float32)  # [..., n, BLOCK, D]
    both = scales.unflatten(-2, (-1, BLOCK)).flatten(-2)[..., : 2 * numbers.shape[-1]].float()
    scale, low = both.unsqueeze(-2).chunk(2, dim=-1)  # [..., n, 1, D]
    return torch.addcmul(low, numbers, scale).flatten(-3, -2).to(dtype)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """uint8 `[..., D]` -> `[..., D * bits / 8]`"""
    parts = numbers.chunk(8 // bits, dim=-1)
    whole = parts[0]
    for index, part in enumerate(parts[1:], 1):
        whole = whole | part << index * bits
    return whole


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """uint8 `[..., D * bits / 8]` -> `[..., D]`"""
    return torch.cat([codes >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=-1)


def turned(x: Tensor) -> Tensor:
    """x `[..., D]` times a Hadamard matrix, its own inverse; in blocks where D is no power of two. float32."""
    matrix = hadamard(x.shape[-1] & -x.shape[-1], x.device)
    return (x.float().unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)


@lru_cache(maxsize=64)
def hadamard(size: int, device: torch.device) -> Tensor:
    """float32 `[size, size]`, symmetric and orthogonal; `size` is a power of two (Sylvester's construction)."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def _codes(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 `[..., n]` that share a scale -> their codes uint8, scales and lows float16 `[...]`."""
    most = (1 << bits) - 1
    low, high = groups.aminmax(dim=-1)
    low = low.clamp(-LARGEST, LARGEST).half()
    scale = ((high - low.float()) / most).clamp(0, LARGEST).half()
    codes = ((groups - low.float()[..., None]) / _divisor(scale)).round_().clamp_(0, most).to(torch.uint8)
    return codes, scale, low


def _divisor(scale: Tensor) -> Tensor:
    """Scales to divide by, `[..., 1]`: a group of equal numbers has the scale 0, and its codes do not matter."""
    scale = scale.float()[..., None]
    return torch.where(scale == 0, torch.ones_like(scale), scale)
