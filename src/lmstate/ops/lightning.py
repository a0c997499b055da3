"""Lightning attention: linear attention in which every head forgets at its own fixed rate.

Qin et al., "Lightning Attention-2" (2401.04658), as MiniMax-01 uses it.
"""

from __future__ import annotations

from torch import Tensor

from lmstate.ops.linear_attention import linear_attention


def lightning(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, carry: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Lightning attention over T tokens of each row; as `linear_attention`.

    slope   [H]             >= 0: a head keeps exp(-slope) of what it knew at every token
    """
    return linear_attention(q, k, v, (-slope).expand(v.shape[:3]), carry, counts)
