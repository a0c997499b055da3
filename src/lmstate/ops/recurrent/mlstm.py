"""The matrix memory of xLSTM: linear attention with gates, and a sum of keys that its answers are divided by.

    C  <-  f C + exp(i) k v^T        n  <-  f n + exp(i) k        f = sigmoid(forget gate)
    h  =   q^T C / (max(|q^T n|, 1) + eps exp(m))                 m <- max(log f + m, i)

Beck et al., "xLSTM" (2405.04517), as xLSTM-7B (2503.13427) has it. There C and n are kept times exp(-m), the largest
input gate that is remembered, so that none overflows; the answers are the same but for epsilon, which m is kept for.
Here gates are bounded before they get here, so that C and n may be kept as they are: sums like any linear attention's,
n as one more column of C.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops.ragged import blank, padding
from lmstate.ops.recurrent.linear_attention import linear_attention
from lmstate.ops.recurrent.scan import running_peaks

Carry = tuple[Tensor, Tensor]


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    carry: Carry,
    counts: Tensor,
    *,
    eps: float,
) -> tuple[Tensor, Carry]:
    """The matrix memory over T tokens of each row.

    q, k                     [R, T, H, D]: q is scaled by D^-0.5 here
    v                        [R, T, H, Dv]
    input_gate, forget_gate  [R, T, H]: before exp and sigmoid, of size 40 at most
    carry                    (C with n as its last column [R, H, D, Dv + 1], m [R, H]), all zero at the start; float32
                             or float64
    counts                   [R] int64

    Returns the answers [R, T, H, Dv] and the new carry, in the carry's dtype.
    """
    state, peak = carry
    dtype, mask = state.dtype, padding(counts, q)
    # Gates are float64: they are few, and in float32 torch rounds the last numbers of a vector otherwise.
    keep, added = F.logsigmoid(forget_gate.double()), input_gate.double()
    columns = torch.cat([v.to(dtype), torch.ones_like(v[..., :1], dtype=dtype)], -1) * added.exp().to(dtype)[..., None]
    y, state = linear_attention(q.to(dtype) * q.shape[-1] ** -0.5, k, columns, keep.to(dtype), state, counts)
    # Padding keeps all and adds nothing.
    added = added if mask is None else added.masked_fill(mask[..., None], float("-inf"))
    peaks = running_peaks(blank(keep, mask), added, peak)  # [R, T, H]
    floor = eps * peaks.exp().to(dtype)[..., None]
    return y[..., :-1] / (y[..., -1:].abs().clamp(min=1.0) + floor), (state, peaks[:, -1].to(peak.dtype))
