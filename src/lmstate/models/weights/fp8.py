"""Matrices of 8-bit floats (E4M3) with a scale for each block, as DeepSeek-V3 (2412.19437, section 3.3) is published.

Beside a matrix `name` lies `name_scale_inv` with one number for each block; the weights are their product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.errors import ModelError
from lmstate.models.weights.fields import Fields

SCALE = "_scale_inv"
DTYPE = torch.float8_e4m3fn


def block_of(quantisation: Fields) -> tuple[int, int]:
    """Rows and columns of a block. `ModelError` for the other ways to scale 8-bit floats."""
    if not quantisation.given("weight_block_size"):
        raise ModelError(
            f"{quantisation.where}: it has no weight_block_size; of 8-bit floats, lmstate reads blocks only"
        )
    quantisation.str("activation_scheme", ("dynamic",), default="dynamic")
    rows, columns = quantisation.ints("weight_block_size", 2, low=1)
    return rows, columns


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a matrix `[..., N, K]`: blocks at the end of an axis may be cut short."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def dequantize(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 `[..., N, K]` from E4M3 `[..., N, K]` and scales `[..., N / block, K / block]`."""
    rows, columns = numbers.shape[-2:]
    # No block is longer than its axis here, whatever the config says: repeating costs no more than the matrix.
    by_row = scales.float().repeat_interleave(min(block[0], rows), -2)[..., :rows, :]
    return by_row.repeat_interleave(min(block[1], columns), -1)[..., :columns].mul_(numbers.float())
