"""Keys and values in 8 or 4 bits a number: groups of at most 64 numbers of one vector share a scale.

int8: `x = scale * code`, codes int8. int4: `x = scale * code + low`, two codes 0..15 in a byte: number i of a group in
the low half, number i + group / 2 in the high one. Scales and lows are float16, those of a vector side by side: all
its scales, then all its lows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

GROUP = 64
"""Numbers that share a scale, at most."""
LARGEST = 65504.0  # of float16


def group_of(dim: int) -> int:
    """How many numbers of a vector of `dim` share a scale: the largest even part of it up to 64."""
    for parts in range(1, dim + 1):
        if dim % parts == 0 and dim // parts <= GROUP and dim // parts % 2 == 0:
            return dim // parts
    raise ValueError(f"vectors of {dim} numbers cannot be quantised, only those of an even number")


def widths(dim: int, bits: int) -> tuple[int, int]:
    """What a vector of `dim` numbers takes: bytes of codes, and numbers of float16."""
    return dim * bits // 8, dim // group_of(dim) * (1 if bits == 8 else 2)


def code_dtype(bits: int) -> torch.dtype:
    return torch.int8 if bits == 8 else torch.uint8


def encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x `[..., D]` -> codes `[..., D * bits / 8]` and float16 scales `[..., n]`."""
    groups = x.detach().float().unflatten(-1, (-1, group_of(x.shape[-1])))  # [..., n, group]
    if bits == 8:
        scale = (groups.abs().amax(-1) / 127).clamp(max=LARGEST).half()
        codes = (groups / _divisor(scale)).round_().clamp_(-127, 127).to(torch.int8)
        return codes.flatten(-2), scale
    low, high = groups.aminmax(dim=-1)
    low = low.clamp(-LARGEST, LARGEST).half()
    scale = ((high - low.float()) / 15).clamp(0, LARGEST).half()
    codes = ((groups - low.float()[..., None]) / _divisor(scale)).round_().clamp_(0, 15).to(torch.uint8)
    half = codes.shape[-1] // 2
    return (codes[..., :half] | codes[..., half:] << 4).flatten(-2), torch.cat([scale, low], dim=-1)


def decode(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `encode` gave -> `[..., D]`."""
    if bits == 8:
        groups = codes.unflatten(-1, (scales.shape[-1], -1)).to(torch.float32)
        return (groups * scales[..., None].float()).flatten(-2).to(dtype)
    scale, low = scales.float().unsqueeze(-1).chunk(2, dim=-2)  # [..., n, 1]
    pairs = codes.unflatten(-1, (scale.shape[-2], -1))
    groups = torch.cat([pairs & 15, pairs >> 4], dim=-1).to(torch.float32)
    return torch.addcmul(low, groups, scale).flatten(-2).to(dtype)


def turned(x: Tensor) -> Tensor:
    """x `[..., D]` times a Hadamard matrix, its own inverse; in blocks where D is no power of two. float32."""
    matrix = hadamard(x.shape[-1] & -x.shape[-1], x.device)
    return (x.float().unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)


@lru_cache(maxsize=64)
def hadamard(size: int, device: torch.device) -> Tensor:
    """float32 `[size, size]`, symmetric and orthogonal; `size` is a power of two (Sylvester's construction)."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def _divisor(scale: Tensor) -> Tensor:
    """Scales to divide by, `[..., 1]`: a group of equal numbers has the scale 0, and its codes do not matter."""
    scale = scale.float()[..., None]
    return torch.where(scale == 0, torch.ones_like(scale), scale)
