"""The calls that run a recurrent layer from the stream and back to it, checked as in `library`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmstate.ops import cpu
from lmstate.ops.cpu.arguments import WEIGHT_KINDS, float_pointer, joining, optional_pointer
from lmstate.ops.cpu.library import Library
from lmstate.ops.cpu.recurrent import function
from lmstate.ops.cpu.recurrent_mixers import DELTA, SSD, Carry, Given, delta_fields, ssd_fields
from lmstate.ops.norm import Norm
from lmstate.ops.residual import Residual
from lmstate.ops.weight import Weight

if TYPE_CHECKING:
    from lmstate.ops.recurrent_layer import DeltaParts, StateSpaceParts

_LAYER = "11P7q3d"
_DELTA_LAYER = Struct(_LAYER + DELTA.format)
_SSD_LAYER = Struct(_LAYER + SSD.format)

Result = tuple[Tensor, Tensor, Carry]


class Layers:
    """The layers of one variant; float32 tensors on the processor."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._delta = function(library, "lmstate_delta_layer")
        self._ssd = function(library, "lmstate_ssd_layer")

    def delta(
        self, x: Tensor, parts: DeltaParts, carry: Carry, counts: Tensor, norm: Norm | None, residual: Residual | None
    ) -> Result:
        """`delta_layer`."""
        rows, tokens = x.shape[:2]
        width, values = parts.conv.shape[0], parts.out.in_features
        gates = parts.A.shape[0] + parts.dt_bias.shape[0]
        x, inputs = x.contiguous(), torch.empty(rows, tokens, width + gates, dtype=torch.float32)
        y = torch.empty(rows, tokens, parts.out.out_features, dtype=torch.float32)
        if parts.qkvz.out_features != width + values or parts.gates.shape != (gates, x.shape[-1]):
            raise ValueError(f"{parts.qkvz} and {parts.gates} do not fit {width} features before {values} values")
        new, _held, mixer = delta_fields(
            rows, tokens, Given(), carry, counts, parts.conv, parts.A, parts.dt_bias, parts.norm, parts.key_heads,
            parts.key_dim, parts.gate_act == "silu", parts.beta_scale,
        )  # fmt: skip
        layer = _layer(x, norm, parts.qkvz, None, parts.gates, parts.out, None, residual, inputs, y)
        _run(self._delta(_DELTA_LAYER.pack(*layer, *mixer)), x)
        return y, inputs, new

    def ssd(
        self,
        x: Tensor,
        parts: StateSpaceParts,
        carry: Carry,
        counts: Tensor,
        norm: Norm | None,
        residual: Residual | None,
    ) -> Result:
        """`ssd_layer`."""
        rows, tokens = x.shape[:2]
        inner, width, heads = parts.out.in_features, parts.conv.shape[0], parts.A.shape[0]
        x, projected = x.contiguous(), torch.empty(rows, tokens, inner + width + heads, dtype=torch.float32)
        y = torch.empty(rows, tokens, parts.out.out_features, dtype=torch.float32)
        if parts.project.out_features != projected.shape[-1] or inner != heads * parts.head_dim:
            raise ValueError(f"{parts.project} and {parts.out} do not fit {heads} heads of {parts.head_dim}")
        gated = (None, 1, False) if (own := parts.norm) is None else (own.norm, own.groups, own.gate_last)
        new, _held, mixer = ssd_fields(
            rows, tokens, Given(), carry, counts, parts.conv, parts.conv_bias, parts.A, parts.D, parts.dt_bias,
            parts.head_dim, parts.groups, parts.dt_limits, *gated,
        )  # fmt: skip
        layer = _layer(x, norm, parts.project, parts.bias, None, parts.out, parts.out_bias, residual, projected, y)
        _run(self._ssd(_SSD_LAYER.pack(*layer, *mixer)), x)
        return y, projected[..., inner:], new


def layers(library: Library) -> Layers:
    """The layers of the same variant."""
    return _opened(library.variant)


@lru_cache
def _opened(variant: str) -> Layers:
    return Layers(ctypes.CDLL(str(cpu.path_of(variant))))


def _layer(
    x: Tensor,
    norm: Norm | None,
    project: Weight,
    bias: Tensor | None,
    gates: Weight | None,
    out: Weight,
    out_bias: Tensor | None,
    residual: Residual | None,
    inputs: Tensor,
    y: Tensor,
) -> tuple[float, ...]:
    embed, outputs, projected = x.shape[-1], out.out_features, project.out_features
    if project.in_features != embed:
        raise ValueError(f"{project} does not fit x {list(x.shape)}")
    before, eps = (0, 0.0) if norm is None else (float_pointer(norm.weight, "the norm's weight", (embed,)), norm.eps)
    stream = 0 if residual is None else float_pointer(residual.stream, "the residual", y.shape)
    after, after_eps, scale = joining(residual, outputs)
    return (
        x.data_ptr(), before, project.storage.data_ptr(), optional_pointer(bias, "the bias", (projected,)),
        0 if gates is None else gates.storage.data_ptr(), out.storage.data_ptr(),
        optional_pointer(out_bias, "the bias of out", (outputs,)), stream, after, inputs.data_ptr(), y.data_ptr(),
        embed, outputs, projected, WEIGHT_KINDS[project.kind], 0 if gates is None else WEIGHT_KINDS[gates.kind],
        WEIGHT_KINDS[out.kind], torch.get_num_threads(), eps, after_eps, scale,
    )  # fmt: skip


def _run(status: int, x: Tensor) -> None:
    if status:
        raise MemoryError(f"no memory for the activations of {list(x.shape)}")
