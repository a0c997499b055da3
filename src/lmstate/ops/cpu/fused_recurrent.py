"""Arguments of recurrent sublayers to the fused call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lmstate.ops.cpu import abi
from lmstate.ops.cpu.abi import SublayerKind, product_kind
from lmstate.ops.cpu.arguments import factor, float_pointer, integers, norm_fields, optional_pointer, simple
from lmstate.ops.cpu.mixers import MixerParts, gated_delta_parts, mamba2_parts
from lmstate.ops.cpu.recurrent import all_float32
from lmstate.ops.types.sublayers import (
    Carry,
    GatedDeltaSublayer,
    Mamba2Sublayer,
    RecurrentSublayer,
    ScanStart,
    ShortConvSublayer,
)

if TYPE_CHECKING:
    from lmstate.ops.types.weight import Weight

_REST = b"\0" * (abi.SUBLAYER_BYTES - 8 - abi.PROJECTIONS.size - abi.MIXER_BYTES - abi.CARRY.size)


class Recurrence(NamedTuple):
    """Constants of a recurrent sublayer over all steps: arguments, mixer, and floats logged a token."""

    arguments: bytes
    parts: MixerParts
    kept: int  # features, of which the scan reads those from `first` on
    first: int


def pack(sublayer: RecurrentSublayer) -> Recurrence | None:
    """A recurrent layer's arguments; None where the bodies do not read its tensors as they are."""
    if not simple(sublayer.norm, sublayer.post_norm):
        return None
    match sublayer:
        case GatedDeltaSublayer(params=params):
            return _delta(sublayer) if _in_place(params.conv, params.A, params.dt_bias, params.norm.weight) else None
        case Mamba2Sublayer(params=of):
            return _ssd(sublayer) if _in_place(of.conv, of.conv_bias, of.A, of.D, of.dt_bias) else None
        case ShortConvSublayer(conv=conv, conv_bias=conv_bias):
            return _conv(sublayer) if _in_place(conv, conv_bias) else None
    raise TypeError(f"no native body runs a {type(sublayer).__name__}")


def _in_place(conv: Tensor, *others: Tensor | None) -> bool:
    """Whether the bodies read these as they are; see `tap_major`."""
    return all_float32(conv, *others) and conv.t().is_contiguous()


def _delta(of: GatedDeltaSublayer) -> Recurrence:
    """A layer of the gated delta rule."""
    parts = gated_delta_parts(of.params.conv.t(), of.params)
    width, embed = parts.carry[0][1], of.in_features
    if of.project.out_features != width + parts.outputs or of.gates.shape != (parts.inputs - width, embed):
        raise ValueError(f"{of.project} and {of.gates} do not fit {width} features before {parts.outputs} values")
    layer = _layer(SublayerKind.GATED_DELTA, of, parts, gates=of.gates)
    return Recurrence(layer, parts, parts.inputs, 0)


def _ssd(of: Mamba2Sublayer) -> Recurrence:
    """A layer of Mamba-2."""
    parts = mamba2_parts(of.params.conv.t(), of.params)
    if of.project.out_features != parts.outputs + parts.inputs:
        raise ValueError(f"{of.project} and {len(of.params.A)} heads of {of.params.head_dim} do not fit each other")
    layer = _layer(SublayerKind.MAMBA2, of, parts, factors=of.factors, parallel=of.parallel)
    return Recurrence(layer, parts, of.project.out_features, parts.outputs)


def _conv(of: ShortConvSublayer) -> Recurrence:
    """A gated short convolution."""
    taps = of.conv.t()
    kernel, width = taps.shape
    if of.project.out_features != 3 * width:
        raise ValueError(f"{of.project} does not give three times the {width} features of a convolution")
    arguments = abi.GATED_CONV_PARTS.pack(
        taps=taps.data_ptr(), bias=optional_pointer(of.conv_bias, "the convolution's bias", (width,)), kernel=kernel
    )
    parts = MixerParts(arguments, width, width, ((kernel - 1, width),))
    layer = _layer(SublayerKind.SHORT_CONV, of, parts)
    return Recurrence(layer, parts, width, 0)


def carried(layer: Recurrence, start: ScanStart, new: Carry, kept: Tensor, marked: Carry | None) -> bytes:
    """All of a layer's arguments: what comes through it in a step, too. The last three are as `room` makes them."""
    shapes, rows = layer.parts.carry, new[0].shape[0]
    before = [float_pointer(part, "the carry", (rows, *shape)) for part, shape in zip(start.carry, shapes, strict=True)]
    after = [part.data_ptr() for part in new]
    if len(shapes) == 1:  # a tail alone
        before, after = [*before, 0], [*after, 0]
    first, most, marks = (0, 0, 0), 0, (0, 0, 0)
    if start.unscanned is not None:
        inputs, counts, counts_t, begins_t = start.unscanned
        most = max(counts)
        first = (
            float_pointer(inputs, "what is not scanned yet", (sum(counts), layer.parts.inputs)),
            integers(counts_t, "its counts", rows).data_ptr(),
            integers(begins_t, "its begins", rows + 1).data_ptr(),
        )
    if start.marks is not None and marked is not None:
        tail, *matrix = (part.data_ptr() for part in marked)
        marks = (integers(start.marks, "marks", rows).data_ptr(), tail, matrix[0] if matrix else 0)
    carried = abi.CARRY.pack(
        tail=before[0], carry=before[1], next_tail=after[0], next=after[1], kept=kept.data_ptr(),
        unscanned=first[0], unscanned_counts=first[1], unscanned_begins=first[2],
        marks=marks[0], marked_tail=marks[1], marked=marks[2], unscanned_tokens=most,
    )  # fmt: skip
    return b"".join([layer.arguments, carried, _REST])


def room(layer: Recurrence, rows: int, tokens: int, marks: bool) -> tuple[Carry, Tensor, Carry | None]:
    """Tensors for the carry that a layer makes, for its log of `tokens` tokens, `[N, kept]`, and at marks."""
    carries = [
        tuple(torch.empty(rows, *shape, dtype=torch.float32) for shape in layer.parts.carry) for _ in range(1 + marks)
    ]
    return carries[0], torch.empty(tokens, layer.kept, dtype=torch.float32), carries[1] if marks else None


def _layer(
    kind: SublayerKind,
    of: RecurrentSublayer,
    parts: MixerParts,
    *,
    gates: Weight | None = None,
    factors: Tensor | None = None,
    parallel: bool = False,
) -> bytes:
    project, out = of.ends
    inputs, projected, outputs = project.in_features, project.out_features, out.out_features
    if out.in_features != parts.outputs:
        raise ValueError(f"{out} does not fit a mixer of {parts.outputs} features")
    before, eps = norm_fields(of.norm, inputs)
    behind, after_eps = norm_fields(of.post_norm, outputs)
    arguments = abi.PROJECTIONS.pack(
        norm=before, project=project.storage.data_ptr(), bias=optional_pointer(of.bias, "the bias", (projected,)),
        gates=0 if gates is None else gates.storage.data_ptr(), out=out.storage.data_ptr(),
        out_bias=optional_pointer(of.out_bias, "the bias of out", (outputs,)), after=behind,
        factors=optional_pointer(factors, "the factors", (projected,)), inputs=inputs, projected=projected,
        outputs=outputs, project_kind=product_kind(project),
        gates_kind=0 if gates is None else product_kind(gates), out_kind=product_kind(out),
        parallel=parallel, norm_eps=eps, after_eps=after_eps, residual_scale=factor(of.scale),
    )  # fmt: skip
    return abi.sublayer(kind, arguments, parts.arguments.ljust(abi.MIXER_BYTES, b"\0"))
