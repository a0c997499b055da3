"""Linear attention whose heads forget: a matrix that decays, and that every token adds to.

    S  <-  exp(g_t) S + k_t v_t^T          S [D, Dv] a head
    o_t =  q_t^T S

Lightning attention has a fixed decay a head (`g = -slope`), the matrix memory of xLSTM a gate. It is the state space of
Mamba-2 with weights of 1, and runs on the same bodies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.cuda import recurrent as cuda
from lmstate.ops.ragged import blank, carry_dtype, padding
from lmstate.ops.recurrent.ssd import RECURRENT_UP_TO, chunked, recurrent
from lmstate.ops.types.recurrences import DeltaOperands


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, carry: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Linear attention over T tokens of each row.

    q, k    [R, T, H, D]
    v       [R, T, H, Dv]
    g       [R, T, H], log decay, <= 0
    carry   [R, H, D, Dv]   float32 or float64
    counts  [R] int64

    Returns the outputs [R, T, H, Dv] and the new carry, both in the carry's dtype.
    """
    dtype = carry_dtype(carry)
    library = dispatch.native(q, k, v, g, carry)
    if library is not None and all_float32(q, k, v, g, carry):
        return library.recurrent.gated_delta_rule(DeltaOperands(q, k, v, g, None, carry, counts, 1.0, False))
    if dispatch.gpu(q, k, v, g, carry) and all_float32(q, k, v, g, carry) and k.shape[3] <= cuda.WIDEST_KEY:
        return cuda.gated_delta_rule(DeltaOperands(q, k, v, g, None, carry, counts, 1.0, False))
    mask = padding(counts, q)
    q, k, v, g = (blank(x.to(dtype), mask) for x in (q, k, v, g))
    weight = blank(torch.ones(v.shape[:3], dtype=dtype, device=v.device), mask)  # [R, T, H]
    body = recurrent if q.shape[1] <= RECURRENT_UP_TO else chunked
    y, new = body(v, weight, g, k, q, None, carry.mT)
    return y, new.mT.contiguous()
