"""The choice of a mixture's experts from their router's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cuda import experts as cuda
from lmstate.ops.types.sublayers import RouterParams


def choose_experts(logits: Tensor, router: RouterParams) -> tuple[Tensor, Tensor] | None:
    """Weights float32 and ids int64 `[M, top_k]` of the experts that logits float32 `[M, N]` choose, best first.

    None where no native body runs. The choice of a `MoESublayer`, bit for bit.
    """
    correction = router.e_score_correction_bias
    if logits.dtype == torch.float32 and logits.shape[1] <= cuda.MOST_EXPERTS and dispatch.gpu(logits, correction):
        return cuda.choose_experts(logits, router)
    library = dispatch.native(logits, correction)
    if library is None or logits.dtype != torch.float32:
        return None
    return library.fused.choose_experts(logits, router)
