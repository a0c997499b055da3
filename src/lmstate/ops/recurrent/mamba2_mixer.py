"""All of a Mamba-2 mixer between its projections: convolution, state space, gate and norm.

One call where there is a native body: a single token then costs little more than a pass over its carry.
"""

from __future__ import annotations

from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cpu.mixers import Carry
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.recurrent.causal_conv import causal_conv
from lmstate.ops.recurrent.gated_norm import gated, gated_norm
from lmstate.ops.recurrent.ssd import ssd
from lmstate.ops.types.mixers import Mamba2Params


def mamba2_mixer(
    inputs: Tensor,
    gate: Tensor | None,
    carry: Carry,
    counts: Tensor,
    params: Mamba2Params,
) -> tuple[Tensor, Carry]:
    """gated_norm(ssd(silu(conv(x, B, C)), dt), gate), of H heads of P = `head_dim` features, their states N wide.

    inputs     [R, T, F]   x, B, C before their convolution `[H * P + 2 * G * N]` | dt `[H]`, as projected
    gate       [R, T, H * P], as projected; None: the outputs are not wanted, and are neither gated nor normalized
    carry      (the convolution's tail [R, C-1, H * P + 2 * G * N], the state [R, H, P, N]), not written
    counts     [R] int64

    Returns `[R, T, H * P]` and the new carry.
    """
    conv, conv_bias, A, D, dt_bias, head_dim, groups, dt_limits, norm, norm_groups, gate_last = params
    weight = None if norm is None else norm.weight
    library = dispatch.native(inputs, gate, *carry, conv, conv_bias, A, D, dt_bias, weight)
    known = all_float32(inputs, gate, *carry, conv, conv_bias, A, D, dt_bias, weight)
    if library is not None and known:
        return library.mixers.mamba2(inputs, gate, carry, counts, params)
    tail, state = carry
    width, inner = len(conv), len(A) * head_dim
    mixed, tail = causal_conv(inputs[..., :width], tail, conv, conv_bias, counts, "silu")
    x, B, C = mixed.split([inner, *[(width - inner) // 2] * 2], dim=-1)
    y, state = ssd(
        x.unflatten(-1, (-1, head_dim)),  # [R, T, H, P]
        inputs[..., width:],
        A,
        B.unflatten(-1, (groups, -1)),  # [R, T, G, N]
        C.unflatten(-1, (groups, -1)),
        D,
        state,
        counts,
        dt_bias=dt_bias,
        dt_limits=dt_limits,
    )
    y = y.flatten(-2)
    if gate is not None and norm is not None:
        y = gated_norm(y, gate, norm, groups=norm_groups, gate_last=gate_last)
    elif gate is not None:
        y = gated(y, gate, "silu")
    return y, (tail, state)
