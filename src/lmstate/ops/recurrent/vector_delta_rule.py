"""The generalized delta rule of RWKV-7: a matrix that decays, forgets and learns by vectors, a number a channel each.

    S  <-  diag(exp g_t) S - (a_t * kk_t) (kk_t^T S) + k_t v_t^T
    o_t =  r_t^T S

kk is of length 1: what S answers to it is removed, as far as a says, and k may differ from it. Peng et al., "RWKV-7"
(2503.14456), whose S is the transposed one.

Token by token at any length, in products and sums of a fixed order, so that no cut changes a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops.ragged import blank, carry_dtype, padding


def vector_delta_rule(
    r: Tensor, g: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, carry: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule over T tokens of each row.

    r, k, kk, a  [R, T, H, D]
    g            [R, T, H, D], log decay, <= 0; float64 where exp is to be the same wherever a number is in a vector
    v            [R, T, H, Dv]
    carry        [R, H, D, Dv]   float32 or float64
    counts       [R] int64

    Returns the outputs [R, T, H, Dv] and the new carry, both in the carry's dtype.
    """
    dtype, mask = carry_dtype(carry), padding(counts, v)
    decay = blank(g, mask).exp().to(dtype)[..., None]  # padding keeps all, removes nothing and adds nothing
    r, k, kk, a = (blank(x.to(dtype), mask)[..., None] for x in (r, k, kk, a))  # [R, T, H, D, 1]
    v = blank(v.to(dtype), mask)[..., None, :]  # [R, T, H, 1, Dv]
    removed, state = a * kk, carry
    outputs = [v[:, :0, :, 0]]
    for t in range(v.shape[1]):
        answer = (kk[:, t] * state).sum(-2, keepdim=True)  # [R, H, 1, Dv]
        state = state * decay[:, t] - removed[:, t] * answer + k[:, t] * v[:, t]
        outputs.append((r[:, t] * state).sum(-2)[:, None])
    return torch.cat(outputs, 1), state
