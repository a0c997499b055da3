"""All of a gated delta rule mixer between its projections: convolution, gates, recurrence, gated norm.

One call where there is a native body: a single token then costs little more than a pass over its carry.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.cpu.mixers import Carry
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.dense.activations import sigmoid
from lmstate.ops.recurrent.causal_conv import causal_conv
from lmstate.ops.recurrent.gated_delta_rule import gated_delta_rule
from lmstate.ops.recurrent.gated_norm import gated_norm
from lmstate.ops.types.mixers import GatedDeltaParams


def gated_delta_mixer(
    inputs: Tensor,
    z: Tensor | None,
    carry: Carry,
    counts: Tensor,
    params: GatedDeltaParams,
) -> tuple[Tensor, Carry]:
    """norm(gated_delta_rule(silu(conv(q, k, v)), A softplus(decay + dt_bias), sigmoid(beta) beta_scale)) gate_act(z).

    inputs   [R, T, F]   q, k, v before their convolution `[2 * Hk * Dk + H * Dv]` | beta `[H]` | decay, as projected
    z        [R, T, H * Dv]: the gate of the outputs, as projected; None: the outputs are not wanted, and have no width
    carry    (the convolution's tail [R, C-1, 2 * Hk * Dk + H * Dv], the state [R, H, Dk, Dv]), not written
    counts   [R] int64

    Returns `[R, T, H * Dv]` and the new carry. q and k are normalized, and q is scaled by Dk^-0.5.
    """
    conv, A, dt_bias, norm, key_heads, key_dim, gate_act, beta_scale, floor = params
    library = dispatch.native(inputs, z, *carry, conv, A, dt_bias, norm.weight)
    known = all_float32(inputs, z, *carry, conv, A, dt_bias, norm.weight)
    if library is not None and known and floor is None:
        return library.mixers.gated_delta(inputs, z, carry, counts, params)
    tail, state = carry
    (width, _), heads, decays = conv.shape, len(A), len(dt_bias)
    mixed, beta, decay = inputs.split([width, heads, decays], dim=-1)
    mixed, tail = causal_conv(mixed, tail, conv, None, counts, "silu")
    keys = key_heads * key_dim
    q, k, v = mixed.split([keys, keys, width - 2 * keys], dim=-1)
    step = (decay + dt_bias).unflatten(-1, (heads, -1))  # [R, T, H, 1 or Dk]
    rate = A[:, None]
    g = rate * F.softplus(step) if floor is None else floor * sigmoid(-rate * step)
    y, state = gated_delta_rule(
        q.unflatten(-1, (key_heads, -1)),
        k.unflatten(-1, (key_heads, -1)),
        v.unflatten(-1, (heads, -1)),
        g if decays > heads else g[..., 0],
        sigmoid(beta) * beta_scale,
        state,
        counts,
        scale=key_dim**-0.5,
        normalize=True,
    )
    if z is None:
        return y[..., 0, :0], (tail, state)
    return gated_norm(y.flatten(-2), z, norm, act=gate_act, groups=heads, gate_last=True), (tail, state)
