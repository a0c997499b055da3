"""Keys and values in a few bits a number: what codes, scales and middles stand for.

A vector is transformed so that no number of it stands out; `x = scale * code`, one scale, or one for each group of a
long vector, float16. Codes of 8 bits are int8; of 4, 3 and 2 bits they are -7.5, -6.5 .. 7.5, -3.5 .. 3.5 and
-1.5 .. 1.5, stored as the difference from the least. A byte holds 2 or 4: number i of the n of a vector is field
`i // (n * bits / 8)` of byte `i % (n * bits / 8)`, the lowest bits first. Of 3 bits the lower two are stored as those
of 2 bits; after these, the third of field f of byte b is bit `b % 2 * 4 + f` of byte `b // 2`.

Of a block of `BLOCK` positions: `x = scale * code + middle`, a scale and a middle for each channel. The codes of a
channel are those of a vector. Across the block's slots are the codes, channel by channel; all scales, then all middles.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 64
"""Numbers of a vector that share a scale, at most, where nothing else is said."""
BLOCK = 64
"""Positions whose keys share a channel's scale."""
LARGEST = 65504.0  # of float16
SPREAD = 1.15
"""Standard deviations that codes of 2 bits are apart, at most. Normally distributed numbers have the least square error
with 1; perplexity was lower with this, which cuts fewer numbers off."""


def group_of(dim: int, bits: int, most: int = GROUP) -> int:
    """Elements of a vector of `dim` that share a scale: the largest part of it up to `most` that fills bytes.

    Raises ValueError for a width that no bytes are filled with.
    """
    if not dim:  # rope keys of layers that know no positions
        return 1
    for parts in range(1, dim + 1):
        if dim % parts == 0 and dim // parts <= most and dim // parts * bits % 8 == 0:
            return dim // parts
    raise ValueError(
        f"Quantized(bits={bits}) was asked for, and the model has vectors of {dim} numbers, which fill no bytes in "
        f"{bits} bits each: those of a multiple of {8 // gcd(8, bits)} do; Quantized(bits=8) stores any width"
    )


def widths(dim: int, bits: int, most: int = GROUP) -> tuple[int, int]:
    """Storage of a vector of `dim` elements: bytes of codes, and float16 scales."""
    return dim * bits // 8, dim // group_of(dim, bits, most)


def code_dtype(bits: int) -> torch.dtype:
    return torch.int8 if bits == 8 else torch.uint8


def encode(x: Tensor, bits: int, most: int = GROUP) -> tuple[Tensor, Tensor]:
    """Transformed x `[..., D]` -> codes `[..., D * bits / 8]` and float16 scales `[..., n]`."""
    groups = x.detach().float().unflatten(-1, (-1, group_of(x.shape[-1], bits, most)))  # [..., n, group]
    scale = _scale(groups, bits)
    return _codes(groups, scale, bits).flatten(-2), scale.squeeze(-1)


def decode(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode codes and scales of `encode` -> `[..., D]`."""
    count = scales.shape[-1]
    groups = _numbers(codes.unflatten(-1, (count, codes.shape[-1] // max(count, 1))), bits)
    return (groups * scales[..., None].float()).flatten(-2).to(dtype)


def block_scales(dim: int) -> int:
    """Numbers of float16 that a slot holds of its block's scales and middles."""
    return -(-2 * dim // BLOCK)


def encode_blocks(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Transformed x `[..., n * BLOCK, D]` -> codes `[..., n * BLOCK, D * bits / 8]`, scales `[..., n * BLOCK,
    block_scales(D)]`."""
    channels = x.detach().float().unflatten(-2, (-1, BLOCK)).mT  # [..., n, D, BLOCK]
    low, high = channels.aminmax(dim=-1, keepdim=True)
    middle = ((low + high) * 0.5).clamp(-LARGEST, LARGEST).half()  # [..., n, D, 1]
    channels = channels - middle.float()
    scale = _scale(channels, bits)
    both = torch.cat([scale, middle], dim=-2).squeeze(-1)  # [..., n, 2 D]
    room = BLOCK * block_scales(x.shape[-1])
    across = _codes(channels, scale, bits).flatten(-2), F.pad(both, (0, room - both.shape[-1]))
    codes, scales = (y.unflatten(-1, (BLOCK, -1)).flatten(-3, -2) for y in across)
    return codes, scales


def decode_blocks(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode codes and scales of `encode_blocks` -> `[..., n * BLOCK, D]`."""
    dim = codes.shape[-1] * 8 // bits
    across, both = (y.unflatten(-2, (-1, BLOCK)).flatten(-2) for y in (codes, scales))
    channels = _numbers(across.unflatten(-1, (dim, -1)), bits)  # [..., n, D, BLOCK]
    scale, middle = both[..., : 2 * dim].float().unsqueeze(-1).chunk(2, dim=-2)  # [..., n, D, 1]
    return torch.addcmul(middle, channels, scale).mT.flatten(-3, -2).to(dtype)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """uint8 `[..., D]` -> `[..., D * bits / 8]`"""
    if bits == 3:
        fields = torch.arange(4, dtype=torch.uint8, device=numbers.device)[:, None]
        thirds = ((numbers >> 2).unflatten(-1, (4, -1)) << fields).sum(-2, dtype=torch.uint8)  # [..., D / 4]
        return torch.cat([packed(numbers & 3, 2), thirds[..., ::2] | thirds[..., 1::2] << 4], dim=-1)
    parts = numbers.chunk(8 // bits, dim=-1)
    whole = parts[0]
    for index, part in enumerate(parts[1:], 1):
        whole = whole | part << index * bits
    return whole


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """uint8 `[..., D * bits / 8]` -> `[..., D]`"""
    if bits == 3:
        lower, thirds = codes.split([codes.shape[-1] // 3 * 2, codes.shape[-1] // 3], dim=-1)
        thirds = torch.stack([thirds & 15, thirds >> 4], dim=-1).flatten(-2)  # [..., D / 4]
        return unpacked(lower, 2) | torch.cat([thirds >> field & 1 for field in range(4)], dim=-1) << 2
    return torch.cat([codes >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """x `[..., D]` times a Hadamard matrix, its own inverse; in blocks where D is not a power of two. float32."""
    matrix = hadamard_matrix(max(1, x.shape[-1] & -x.shape[-1]), x.device)
    return (x.float().unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)


@lru_cache(maxsize=64)
def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """float32 `[size, size]`, symmetric and orthogonal; `size` is a power of two (Sylvester's construction)."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def _most(bits: int) -> float:
    """The largest code."""
    return 127 if bits == 8 else ((1 << bits) - 1) / 2


def _scale(x: Tensor, bits: int) -> Tensor:
    """For x `[..., D]`: float16 `[..., 1]`."""
    scale = x.abs().amax(-1, keepdim=True) / _most(bits)
    if bits == 2:
        scale = torch.minimum(scale, SPREAD * x.square().mean(-1, keepdim=True).sqrt())
    return scale.clamp(max=LARGEST).half()


def _codes(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """float32 x `[..., D]` over float16 scales, as they are stored."""
    most = _most(bits)
    x = x / torch.where(scale == 0, 1.0, scale.float())  # what all is 0 has the scale 0, and its codes do not matter
    if bits == 8:
        return x.round_().clamp_(-most, most).to(torch.int8)
    return packed((x + most).round_().clamp_(0, 2 * most).to(torch.uint8), bits)


def _numbers(codes: Tensor, bits: int) -> Tensor:
    """Stored codes -> what they are, float32 `[..., D]`."""
    return codes.float() if bits == 8 else unpacked(codes, bits).float() - _most(bits)
