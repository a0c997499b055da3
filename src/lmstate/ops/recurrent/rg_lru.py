"""The RG-LRU of Griffin: a decay a channel, chosen by each token, that keeps the size of what it remembers.

    a_t = exp(-8 softplus(Lambda) sigmoid(recurrence gate))
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(input gate) x_t

De et al., "Griffin" (2402.19427). The first token of a sequence is not scaled down: it enters as sigmoid(input gate) x.
The carry knows which token is the first (`seen`), so no positions are passed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.cuda import recurrent as cuda
from lmstate.ops.ragged import blank, carry_dtype, padding
from lmstate.ops.recurrent.scan import scan, split
from lmstate.ops.types.recurrences import RGLRUOperands

RECURRENT_UP_TO = 16
"""Steps of at most this many tokens run token by token; measured on F = 2560."""

PIECE = 1024
"""Tokens whose chunks run side by side; longer steps are cut."""


def rg_lru(
    x: Tensor,
    input_gate: Tensor,
    recurrence_gate: Tensor,
    recurrent_param: Tensor,
    carry: tuple[Tensor, Tensor],
    counts: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The RG-LRU over T tokens of each row.

    x                            [R, T, F]
    input_gate, recurrence_gate  [R, T, F]  before their sigmoid
    recurrent_param              [F]        Lambda
    carry                        (h [R, F], seen [R]): float32 or float64. All zeros is a fresh row;
                                 seen is 1 once the row has had a token
    counts                       [R] int64

    Returns the states h [R, T, F], which are the outputs, and the new carry, in the carry's dtype.
    """
    h, seen = carry
    given = (x, input_gate, recurrence_gate, recurrent_param, h, seen)
    library = dispatch.native(*given)
    if library is not None and all_float32(*given):
        return library.recurrent.rg_lru(RGLRUOperands(*given, counts))
    if dispatch.gpu(*given) and all_float32(*given):
        return cuda.rg_lru(RGLRUOperands(*given, counts))
    dtype, width = carry_dtype(h), x.shape[1]
    mask = padding(counts, x)
    x, input_gate, recurrence_gate = (blank(each.to(dtype), mask) for each in (x, input_gate, recurrence_gate))
    log_decay = -8 * F.softplus(recurrent_param.to(dtype)) * torch.sigmoid(recurrence_gate)
    fresh = (seen == 0)[:, None] & (torch.arange(width, device=x.device) == 0)  # [R, T]
    # 1 - a^2 as -expm1(2 log a), exact where the decay is near 1.
    size = torch.where(fresh[..., None], 1.0, torch.sqrt(-torch.expm1(2 * log_decay)))
    decay = torch.exp(blank(log_decay, mask))
    body = recurrent if width <= RECURRENT_UP_TO else chunked
    y, h = body(decay, size * torch.sigmoid(input_gate) * x, h)
    return y, (h, torch.maximum(seen, (counts > 0).to(seen)))


def recurrent(decay: Tensor, update: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """h <- decay h + update, token by token: decay, update [R, T, F], h [R, F] -> all states [R, T, F] and the last."""
    states, h = scan(decay[:, None], update[:, None], h)
    return torch.cat(states, 1), h


def chunked(decay: Tensor, update: Tensor, h: Tensor, *, piece: int = PIECE) -> tuple[Tensor, Tensor]:
    """Scan as `recurrent` does, chunks side by side."""
    outputs = [update[:, :0]]
    for first, last, size in split(update.shape[1], piece):
        states, h = scan(
            decay[:, first:last].unflatten(1, (-1, size)), update[:, first:last].unflatten(1, (-1, size)), h
        )
        outputs.append(torch.stack(states, 2).flatten(1, 2))
    return torch.cat(outputs, 1), h
