"""Matrices of 8-bit floats (E4M3) with scales: a number for the whole, for each output, or for each block.

Blocks are how DeepSeek-V3 (2412.19437, section 3.3) is published. Beside a matrix `name` are its scales, as
`name_scale_inv` or `name_scale`, or in the place of its `weight` as `scale` (DeepSeek-V4); the weights are their
product, whatever the suffix says. Scales may be powers of two, in a byte each (MXFP8). Scales to round activations with
are of no use where activations are not rounded.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config

METHODS = ("fp8", "mxfp8", "compressed-tensors", "fbgemm_fp8", "modelopt")
"""The `quant_method`s whose 8-bit floats are read; whatever else they store is refused."""

SCALES = ("_scale_inv", "_scale")
OF_ACTIVATIONS = ("activation_scale", "input_scale", "input_scale_ub")
DTYPE = torch.float8_e4m3fn
EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)  # an exponent e stands for 2 ** (e - 127)
MXFP8_BLOCK = (1, 32)


def block_of(quantization: Config) -> tuple[int, int] | None:
    """Rows and columns of a block, where the config knows of blocks."""
    if quantization.given("weight_block_size"):
        rows, columns = quantization.ints("weight_block_size", 2, low=1)
        return rows, columns
    if quantization.get("quant_method") == "mxfp8":
        return MXFP8_BLOCK
    groups = quantization.fields("config_groups") or Config({})
    for name in groups:
        group = groups.fields(name)
        weights = None if group is None else group.fields("weights")
        if weights is not None and weights.given("block_structure"):
            rows, columns = weights.ints("block_structure", 2, low=1)
            return rows, columns
    return None


def scales_of(name: str, names: Collection[str]) -> str | None:
    """The name of a matrix's scales, where they are there."""
    places = [name + suffix for suffix in SCALES]
    places += [f"{name.removesuffix('weight')}scale"] if name.endswith(".weight") else []
    return next((place for place in places if place in names), None)


def scale_values(scales: Tensor) -> Tensor:
    """Scales in float32, of floats or of exponents."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype in EXPONENTS else scales).float()


def scales_at(scales: Tensor, index: int, count: int) -> Tensor:
    """The scales of one of `count` stacked matrices, of those of all, which fit."""
    return scales[index] if scales.dim() and len(scales) == count else scales


def of_activations(name: str) -> set[str]:
    """The names under which a matrix may have what its activations would be rounded with."""
    return {f"{stem}{suffix}" for stem in (name.removesuffix("weight"), f"{name}_") for suffix in OF_ACTIVATIONS}


def scales_fit(scales: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int] | None) -> bool:
    """Whether scales can be those of a matrix `[..., N, K]`; a block may be cut short where an axis ends."""
    if len(shape) < 2:
        return False
    if block is not None:
        return scales == (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    whole = all(size == 1 for size in scales) or scales == (*shape[:-2], 1, 1)
    return whole or scales in (shape[:-1], (*shape[:-1], 1))


def dequantize(numbers: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """float32 `[..., N, K]` from E4M3 `[..., N, K]` and scales that fit."""
    rows, columns = numbers.shape[-2:]
    scales = scales.float()
    if block is None:
        if scales.numel() == 1:
            return numbers.float() * scales.reshape(())
        return numbers.float() * (scales if scales.dim() == numbers.dim() else scales[..., None])
    # No block is longer than its axis here, whatever the config says: repeating costs no more than the matrix.
    by_row = scales.repeat_interleave(min(block[0], rows), -2)[..., :rows, :]
    return by_row.repeat_interleave(min(block[1], columns), -1)[..., :columns].mul_(numbers.float())
