"""The short depthwise causal convolution before a recurrence, as a scan: its carry is the last inputs of each row.

A token sees itself and the C - 1 tokens before it, so a step must keep the last C - 1 inputs *as of each row's count*.
A row with fewer new tokens keeps part of its old tail.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.cuda import recurrent as cuda
from lmstate.ops.ragged import blank, padding

Activation = Literal["silu"]

WINDOW_UP_TO = 4
"""Steps of at most this many tokens are computed by `convolve_windows`; measured, as is BLOCK, with F = 6144, C = 4."""

BLOCK = 64
"""Tokens that `convolve_shifts` takes at a time: the partial sums of a block stay in the cache."""


def causal_conv(
    x: Tensor,
    tail: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Tensor,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor]:
    """y[t] = act(bias + sum over c of weight[:, c] * x[t - (C - 1) + c]), with x[-1], x[-2], ... from the tail.

    x       [R, T, F]     float: new inputs, right-padded
    tail    [R, C-1, F]   the inputs before them, oldest first (zeros at the start of a sequence)
    weight  [F, C]        as in `nn.Conv1d(F, F, C, groups=F)`, its middle axis squeezed out; C >= 1
    bias    [F] or None
    counts  [R] int64     real tokens of each row

    Returns y [R, T, F], finite at padded positions too, and the new tail [R, C-1, F] in the old one's dtype.
    """
    width, kernel = x.shape[1], weight.shape[1]
    if tail.shape[1] != kernel - 1:
        raise ValueError(f"a kernel of {kernel} needs a tail of {kernel - 1} inputs, but it has {tail.shape[1]}")
    if activation not in (None, "silu"):
        raise ValueError(f"causal_conv knows the activation 'silu' and None, not {activation!r}")
    library = dispatch.native(x, tail, weight, bias)
    if library is not None and all_float32(x, tail, weight, bias):
        return library.recurrent.causal_conv(x, tail, weight, bias, counts, activation == "silu")
    if kernel > 1 and dispatch.gpu(x, tail, weight, bias) and all_float32(x, tail, weight, bias):
        return cuda.causal_conv(x, tail, weight, bias, counts, activation == "silu")
    mask = padding(counts, x)
    joined = torch.cat([tail.to(x.dtype), blank(x, mask)], 1)  # [R, C-1+T, F]
    body = convolve_windows if width <= WINDOW_UP_TO else convolve_shifts
    y = body(joined, weight, bias)
    if activation == "silu":
        y = F.silu(y)
    return y, last_inputs(joined, counts, kernel - 1, full=mask is None).to(tail.dtype)


def tap_major(weight: Tensor) -> Tensor:
    """Weight [F, C] laid out tap by tap, which the native body reads without a copy."""
    return weight.t().contiguous().t()


def last_inputs(joined: Tensor, counts: Tensor, length: int, full: bool) -> Tensor:
    """The new tail [R, length, F]: joined[r, counts[r] : counts[r] + length], the inputs before row r's next token.

    `full` says that every row's count is the width, where this is one slice.
    """
    if full:
        return joined[:, joined.shape[1] - length :].clone()  # a view would keep the whole step's inputs alive
    index = counts.to(joined.device)[:, None] + torch.arange(length, device=joined.device)  # [R, length]
    return joined.gather(1, index[:, :, None].expand(-1, -1, joined.shape[2]))


def convolve_windows(joined: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of a short step: one product and one sum over windows. joined [R, C-1+T, F] -> [R, T, F]."""
    y = (joined.unfold(1, weight.shape[1], 1) * weight).sum(-1)  # windows [R, T, F, C], a view
    return y if bias is None else y + bias


def convolve_shifts(joined: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of a long step: C shifted products, a block of tokens at a time. [R, C-1+T, F] -> [R, T, F]."""
    taps = weight.t().contiguous()  # [C, F]
    width = joined.shape[1] - len(taps) + 1
    blocks = []
    for first in range(0, width, BLOCK):
        size = min(BLOCK, width - first)
        y = joined[:, first : first + size] * taps[0]
        for c in range(1, len(taps)):
            y.addcmul_(joined[:, first + c : first + c + size], taps[c])
        blocks.append(y if bias is None else y.add_(bias))
    return torch.cat(blocks, 1)
