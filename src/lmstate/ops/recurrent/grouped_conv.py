"""A causal convolution in which every head mixes its own features, as a scan: its carry is each row's last inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops.dense.per_head import per_head_matmul
from lmstate.ops.ragged import blank, padding
from lmstate.ops.recurrent.causal_conv import last_inputs


def head_conv(x: Tensor, tail: Tensor, matrices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """y[t, h] = sum over c of x[t - (C - 1) + c, h] @ matrices[h, c], with x[-1], x[-2], ... from the tail.

    x         [R, T, H, D]     float: new inputs, right-padded
    tail      [R, C-1, H, D]   the inputs before them, oldest first (zeros at the start of a sequence)
    matrices  [H, C * D, D]    those of a head one under the other, the oldest input's first
    counts    [R] int64        real tokens of each row

    Returns y [R, T, H, D], finite at padded positions too, and the new tail [R, C-1, H, D] in the old one's dtype.
    """
    rows, width, heads, dim = x.shape
    kernel = tail.shape[1] + 1
    if matrices.shape != (heads, kernel * dim, dim):
        raise ValueError(
            f"a tail of {kernel - 1} inputs of {heads} heads of {dim} needs matrices {[heads, kernel * dim, dim]}, "
            f"and they are {list(matrices.shape)}"
        )
    mask = padding(counts, x)
    joined = torch.cat([tail.to(x.dtype), blank(x, mask)], 1)  # [R, C-1+T, H, D]
    windows = joined.unfold(1, kernel, 1).mT.reshape(rows, width, heads, kernel * dim)  # unfolded [R, T, H, D, C]
    last = last_inputs(joined.flatten(2), counts, kernel - 1, full=mask is None)
    return per_head_matmul(windows, matrices), last.view_as(tail).to(tail.dtype)
