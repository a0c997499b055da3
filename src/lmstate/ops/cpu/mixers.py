"""The calls that run a mixer from its projected inputs to what its last projection multiplies.

Every call returns new tensors; the carry that it was given is only read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lmstate.ops.cpu import abi
from lmstate.ops.cpu.arguments import function
from lmstate.ops.cpu.recurrent import counted, expect, optional, threads_for
from lmstate.ops.types.mixers import GatedDeltaParams, Mamba2Params

Carry = tuple[Tensor, Tensor]


class MixerParts(NamedTuple):
    """Weights of a mixer as arguments, and the shapes of its inputs but for rows and tokens."""

    arguments: bytes
    inputs: int
    outputs: int
    carry: tuple[tuple[int, ...], ...]
    """A convolution's tail, and a state where there is one."""


class MixerBodies:
    """The mixers of one variant; float32 tensors on the processor. Signatures as in the operations."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._gated_delta = function(library, "lmstate_gated_delta_mixer")
        self._mamba2 = function(library, "lmstate_mamba2_mixer")

    def gated_delta(
        self,
        inputs: Tensor,
        z: Tensor | None,
        carry: Carry,
        counts: Tensor,
        params: GatedDeltaParams,
    ) -> tuple[Tensor, Carry]:
        """`gated_delta_mixer`."""
        taps = params.conv.t().contiguous()
        parts = gated_delta_parts(taps, params)
        return _scanned(self._gated_delta, parts, inputs, z, carry, counts, 0 if z is None else parts.outputs)

    def mamba2(
        self,
        inputs: Tensor,
        gate: Tensor | None,
        carry: Carry,
        counts: Tensor,
        params: Mamba2Params,
    ) -> tuple[Tensor, Carry]:
        """`mamba2_mixer`."""
        taps = params.conv.t().contiguous()
        parts = mamba2_parts(taps, params)
        return _scanned(self._mamba2, parts, inputs, gate, carry, counts, parts.outputs)


def gated_delta_parts(taps: Tensor, params: GatedDeltaParams) -> MixerParts:
    """Weights of a `gated_delta_mixer` as arguments. taps: those of its convolution `[C, W]`, contiguous."""
    _, A, dt_bias, norm, key_heads, key_dim, gate_act, beta_scale, floor = params
    if floor is not None:
        raise ValueError("no native body bounds the log decay")
    kernel, width = taps.shape
    heads, decays = A.shape[0], dt_bias.shape[0]
    values = width - 2 * key_heads * key_dim
    value_dim = values // heads
    if heads % key_heads or values % heads or decays not in (heads, heads * key_dim):
        raise ValueError(f"{heads} heads over {key_heads} of {key_dim} do not fit a convolution of {width} features")
    arguments = abi.GATED_DELTA_PARTS.pack(
        taps=taps.data_ptr(), A=optional(A, "A", heads), bias=optional(dt_bias, "the bias of dt", decays),
        norm=optional(norm.weight, "the norm's weight", value_dim), key_heads=key_heads, heads=heads,
        key_dim=key_dim, value_dim=value_dim, kernel=kernel, by_channel=decays > heads, silu=gate_act == "silu",
        beta_scale=beta_scale, eps=norm.eps,
    )  # fmt: skip
    return MixerParts(arguments, width + heads + decays, values, ((kernel - 1, width), (heads, key_dim, value_dim)))


def mamba2_parts(taps: Tensor, params: Mamba2Params) -> MixerParts:
    """Weights of a `mamba2_mixer` as arguments. taps: those of its convolution `[C, W]`, contiguous."""
    _, conv_bias, A, D, dt_bias, head_dim, groups, dt_limits, norm, norm_groups, gate_last = params
    kernel, width = taps.shape
    heads = A.shape[0]
    inner = heads * head_dim
    states = (width - inner) // (2 * groups)
    weights = 0 if norm is None else norm.weight.shape[0]
    if width != inner + 2 * groups * states or heads % groups:
        raise ValueError(f"{heads} heads of {head_dim} in {groups} groups do not fit a convolution of {width} features")
    if norm is not None and (inner % norm_groups or weights not in (inner, inner // norm_groups)):
        raise ValueError(f"{norm_groups} groups of {inner} features cannot have {weights} weights")
    arguments = abi.MAMBA2_PARTS.pack(
        taps=taps.data_ptr(), conv_bias=optional(conv_bias, "the convolution's bias", width),
        A=optional(A, "A", heads), D=optional(D, "D", heads), dt_bias=optional(dt_bias, "the bias of dt", heads),
        norm=0 if norm is None else optional(norm.weight, "the norm's weight", weights),
        heads=heads, head_dim=head_dim, groups=groups, states=states, kernel=kernel, norm_groups=norm_groups,
        norm_weights=weights, gate_last=gate_last, low=dt_limits[0], high=dt_limits[1],
        eps=0.0 if norm is None else norm.eps,
    )  # fmt: skip
    return MixerParts(arguments, width + heads, inner, ((kernel - 1, width), (heads, head_dim, states)))


def _scanned(
    call: Callable[[bytes], int],
    parts: MixerParts,
    inputs: Tensor,
    gate: Tensor | None,
    carry: Carry,
    counts: Tensor,
    outputs: int,
) -> tuple[Tensor, Carry]:
    rows, tokens = inputs.shape[:2]
    inputs, gate = _dense(inputs), None if gate is None else _dense(gate)
    tail, state = (part.contiguous() for part in carry)
    expect(inputs, "the inputs", (rows, tokens, parts.inputs))
    expect(tail, "the tail", (rows, *parts.carry[0]))
    expect(state, "the carry", (rows, *parts.carry[1]))
    if gate is not None:
        expect(gate, "the gate", (rows, tokens, parts.outputs))
    y = torch.empty(rows, tokens, outputs, dtype=torch.float32)
    new = torch.empty(tail.shape, dtype=torch.float32), torch.empty(state.shape, dtype=torch.float32)
    scan = abi.SCAN.pack(
        x=inputs.data_ptr(), z=0 if gate is None else gate.data_ptr(), tail=tail.data_ptr(), carry=state.data_ptr(),
        counts=counted(counts, rows).data_ptr(), begins=0, y=y.data_ptr() if outputs else 0,
        next_tail=new[0].data_ptr(), next=new[1].data_ptr(), marks=0, marked_tail=0, marked=0, rows=rows,
        tokens=tokens, threads=threads_for(tokens * state.numel()), x_row=inputs.stride(0), x_token=inputs.stride(1),
        z_row=0 if gate is None else gate.stride(0), z_token=0 if gate is None else gate.stride(1),
    )  # fmt: skip
    if call(scan + parts.arguments):
        raise MemoryError(f"no memory for {tokens} tokens of {parts.inputs} features in {rows} rows")
    return y, new


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()
