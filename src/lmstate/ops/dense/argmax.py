"""The largest number of a row and its place: what greedy decoding asks of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cuda import dense as cuda


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: float32 `[R, V]` -> the largest number of each row, float32 `[R]`, and its first place, int64 `[R]`.

    As in `torch.max`, NaN counts as larger than all.
    """
    if x.dtype == torch.float32 and x.numel() and dispatch.gpu(x):
        return cuda.argmax(x)
    library = dispatch.native(x)
    if library is None or x.dtype != torch.float32:
        largest, where = x.max(-1)
        return largest, where
    return library.dense.argmax(x)
