"""The elementwise linear recurrence h_t = a_t h_{t-1} + u_t, without a Python step a token.

A stretch is split into n chunks of L tokens that advance together, one position at a time. The first pass starts each
chunk from zero and finds what it adds and keeps. This gives the true state before every chunk, from which the second
pass starts. So every state is computed by the recurrence itself. Decays are only multiplied, which cannot overflow, and
never divided by.
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cuda import recurrent as cuda


def running_peaks(kept: Tensor, added: Tensor, peak: Tensor) -> Tensor:
    """The exponents p_t = max(kept_t + p_{t-1}, added_t), float64 [R, T, ...], from that before [R, ...].

    Each is rounded to the carry's dtype, as the one at a cut is: so a cut changes none.
    kept, added [R, T, ...] float64.
    """
    if peak.dtype == torch.float32 and dispatch.gpu(kept, added, peak):
        return cuda.running_peaks(kept, added, peak)
    last, peaks = peak.double(), []
    for keep, add in zip(kept.unbind(1), added.unbind(1), strict=True):
        last = torch.maximum(last + keep, add).to(peak.dtype).double()
        peaks.append(last)
    return torch.stack(peaks, 1)


def split(width: int, limit: int) -> list[tuple[int, int, int]]:
    """Pieces (first, last, L) of a step of `width` tokens for `scan`: at most `limit` tokens each, in chunks of L.

    L is near the square root of the piece, where positions and chunks are equally many.
    """
    pieces, first = [], 0
    while first < width:
        piece = min(limit, width - first)
        size = max(isqrt(piece), min(piece, 4))
        last = first + piece - piece % size
        pieces.append((first, last, size))
        first = last
    return pieces


def scan(decay: Tensor, update: Tensor, carry: Tensor) -> tuple[list[Tensor], Tensor]:
    """The states [R, n, ...] at each of the L positions of n consecutive chunks, and the last state of all.

    decay, update [R, n, L, ...], carry [R, ...]; decays are in [0, 1].
    """
    decays, updates = decay.unbind(2), update.unbind(2)
    before = carry[:, None]
    if decay.shape[1] > 1:
        added, kept = updates[0], decays[0]
        for a, u in zip(decays[1:], updates[1:]):
            added = torch.addcmul(u, a, added)
            kept = kept * a
        entries = [carry]
        for n in range(decay.shape[1] - 1):
            entries.append(torch.addcmul(added[:, n], kept[:, n], entries[-1]))
        before = torch.stack(entries, 1)
    states = []
    for a, u in zip(decays, updates):
        before = torch.addcmul(u, a, before)
        states.append(before)
    last = before[:, -1]
    return states, last.clone() if before.shape[1] > 1 else last  # a view would keep the other chunks' states alive
