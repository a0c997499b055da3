"""The gated feed-forward part of a block as one operation, from the residual stream and back to it."""

from __future__ import annotations

from torch import Tensor

from lmstate.ops.halves import FeedForwardHalf
from lmstate.ops.linear import few_rows, linear
from lmstate.ops.norm import Norm
from lmstate.ops.residual import Residual
from lmstate.ops.run import fused_feed_forward
from lmstate.ops.weight import Weight


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
    stream, after, scale = residual or (None, None, 1.0)
    half = FeedForwardHalf(up, down, act, norm, after, scale, up_bias, down_bias)
    if few_rows(x) and (y := fused_feed_forward(x, half, stream)) is not None:
        return y
    hidden = linear(x, up, up_bias, norm=norm)
    return linear(hidden, down, down_bias, gate=act, residual=residual)
