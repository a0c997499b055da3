"""Lightning attention: linear attention in which every head forgets at its own fixed rate.

    S  <-  exp(-slope) S + k_t v_t^T          S [D, Dv] a head
    o_t =  q_t^T S

Qin et al., "Lightning Attention-2" (2401.04658), as MiniMax-01 uses it. It is the state space of Mamba-2 with
weights of 1 and a decay that depends on nothing, and runs on the same bodies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops._padding import blank, carry_dtype, padding
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.cpu.recurrent import recurrent as native_bodies
from lmstate.ops.ssd import RECURRENT_UP_TO, chunked, recurrent


def lightning(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, carry: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Lightning attention over T tokens of each row.

    q, k    [R, T, H, D]
    v       [R, T, H, Dv]
    slope   [H]             >= 0: a head keeps exp(-slope) of what it knew at every token
    carry   [R, H, D, Dv]   float32 (or float64: then everything is computed in float64); not written
    counts  [R] int64       tokens of a row from its count on are padding: they leave its carry alone

    Returns the outputs [R, T, H, Dv] and the new carry, both in the carry's dtype.
    """
    dtype = carry_dtype(carry)
    library = dispatch.native(q, k, v, slope, carry)
    if library is not None and all_float32(q, k, v, slope, carry):
        bodies = native_bodies(library)
        if q.shape[1] <= bodies.longest:
            rates = (-slope).expand(v.shape[:3])  # [R, T, H]
            return bodies.delta(q, k, v, rates, None, carry, counts, scale=1.0, normalize=False)
    mask = padding(counts, q.shape[1])
    q, k, v = (blank(x.to(dtype), mask) for x in (q, k, v))
    weight = blank(torch.ones(v.shape[:3], dtype=dtype, device=v.device), mask)  # [R, T, H]
    body = recurrent if q.shape[1] <= RECURRENT_UP_TO else chunked
    y, new = body(v, weight, -slope.to(dtype) * weight, k, q, None, carry.mT)
    return y, new.mT.contiguous()
