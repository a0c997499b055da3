"""Padding of ragged rows, blanked before it can be read.

Masking the result of a product is not enough, for a NaN in the padding survives a multiplication by zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def padding(counts: Tensor, x: Tensor) -> Tensor | None:
    """Padding mask of inputs `x` `[R, T, ...]`, bool `[R, T]`; None where it is cheap to see that there is no padding.

    Counts on the host tell, so that the usual step (every row full) costs no pass over its inputs; of others an answer
    would stall the device or break a traced graph, and a mask is always built.
    """
    width = x.shape[1]
    if counts.is_cpu and not torch.compiler.is_compiling() and int(counts.min()) >= width:
        return None
    return torch.arange(width, device=x.device) >= counts.to(x.device)[:, None]


def blank(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` [R, T, ...] with the padded tokens zero, whatever they held."""
    if mask is None:
        return x
    return x.masked_fill(mask.reshape(*mask.shape, *(1,) * (x.dim() - 2)), 0)


def carry_dtype(carry: Tensor) -> torch.dtype:
    """The dtype a recurrence computes in: that of its carry, never below float32."""
    if carry.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"a recurrent carry was given as {carry.dtype}, in which its errors would add up over the stream: "
            "keep carries in float32 (or float64 to check gradients)"
        )
    return carry.dtype
