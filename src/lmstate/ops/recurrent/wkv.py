"""The linear attention of RWKV-4: every channel averages its values, by weights that decay and that keys grow.

    y_t = (num_{t-1} + e^{u + k_t} v_t) / (den_{t-1} + e^{u + k_t})
    num <- e^w num + e^{k_t} v_t          den <- e^w den + e^{k_t}

Peng et al., "RWKV" (2305.13048). Keys are not bounded, so num and den are kept times e^-p, with e^p the largest weight
that is remembered: p <- max(w + p, k_t). Once all p of a step are known, num and den are a linear recurrence with
decays in 0..1, each channel its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.cuda import recurrent as cuda
from lmstate.ops.ragged import blank, carry_dtype, padding
from lmstate.ops.recurrent.rg_lru import recurrent
from lmstate.ops.recurrent.scan import running_peaks

Carry = tuple[Tensor, Tensor, Tensor]

NOTHING = -1e30
"""The p before the first token; not infinite, for infinities do not cancel."""


def wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, carry: Carry, counts: Tensor) -> tuple[Tensor, Carry]:
    """The averages of T tokens of each row.

    k, v          [R, T, F]
    decay, bonus  [F]        w < 0 and u
    carry         (num, den, p), each [R, F], float32 or float64.
                  All zeros is a fresh row
    counts        [R] int64

    Returns y [R, T, F] and the new carry, in the carry's dtype.
    """
    num, den, peak = carry
    given = (k, v, decay, bonus, *carry)
    if dispatch.gpu(*given) and all_float32(*given):
        return cuda.wkv(k, v, decay, bonus, carry, counts, NOTHING)
    dtype, mask = carry_dtype(num), padding(counts, k)
    v, keys = blank(v.to(dtype), mask), blank(k, mask).double()
    kept = blank(decay.double().expand(keys.shape), mask)  # padding keeps all
    added = keys if mask is None else keys.masked_fill(mask[..., None], float("-inf"))  # and adds nothing
    # Exponents are float64, where exp is the same wherever a number is in a vector.
    start = torch.where(den > 0, peak, NOTHING)
    peaks = running_peaks(kept, added, start)  # [R, T, F]
    before = torch.cat([start.double()[:, None], peaks[:, :-1]], 1)
    keep, grow = ((exponent - peaks).exp().to(dtype) for exponent in (kept + before, added))
    states = torch.cat([num, den], -1)
    # Token by token at any length: chunks side by side would round otherwise than tokens that come alone.
    all_states, last = recurrent(torch.cat([keep, keep], -1), torch.cat([grow * v, grow], -1), states)
    before_num, before_den = torch.cat([states[:, None], all_states[:, :-1]], 1).chunk(2, dim=-1)
    own = keys + bonus.double()
    top = torch.maximum(before, own)
    past, now = ((exponent - top).exp().to(dtype) for exponent in (before, own))
    num, den = last.chunk(2, dim=-1)
    peak = torch.where((counts > 0).to(peak.device)[:, None], peaks[:, -1].to(peak.dtype), peak)
    return (past * before_num + now * v) / (past * before_den + now), (num.contiguous(), den.contiguous(), peak)
