"""The gated feed-forward part of a block as one operation, from the residual stream and back to it."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cuda import dense as cuda
from lmstate.ops.dense.linear import linear
from lmstate.ops.dense.norm import norm as apply_norm
from lmstate.ops.fused.graph import fused_feed_forward, is_short
from lmstate.ops.types.params import Norm, Residual
from lmstate.ops.types.sublayers import MLPSublayer
from lmstate.ops.types.weight import Weight


def feed_forward(
    x: Tensor,
    up: Weight,
    down: Weight,
    act: str,
    *,
    norm: Norm | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: Residual | None = None,
) -> Tensor:
    """`down(act(gate) * up)`, added to `residual`, with gate | up = `up(norm(x))`; float32 `[..., N]`.

    x: float32 `[..., K]`; up: `[2F, K]`; down: `[N, F]`. Bit for bit the same as two `linear`.
    """
    if x.is_cpu and is_short(x):
        stream, after, scale = residual or (None, None, 1.0)
        # All by name: torch's compiler, before 2.13, takes the order of a dataclass's fields for that of its arguments.
        sublayer = MLPSublayer(
            up=up, down=down, act=act, up_bias=up_bias, down_bias=down_bias, norm=norm, post_norm=after, scale=scale
        )  # fmt: skip
        if (y := fused_feed_forward(x, sublayer, stream)) is not None:
            return y
    if (
        act in cuda.GATES
        and cuda.can_multiply(up)
        and x.dtype == torch.float32
        and dispatch.gpu(x, up.storage, up_bias)
        and not cuda.leaves_to_torch(x, up)
    ):
        hidden = cuda.linear_glu(x if norm is None else apply_norm(x, norm), up, up_bias, act)
        return linear(hidden, down, down_bias, residual=residual)
    hidden = linear(x, up, up_bias, norm=norm)
    return linear(hidden, down, down_bias, gate=act, residual=residual)
