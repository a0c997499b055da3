"""The calls that run a mixer from its projected inputs to what its last projection multiplies, checked as in `library`.

Every call returns new tensors; the carry that it was given is only read.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from lmstate.ops import cpu
from lmstate.ops.cpu.library import Library
from lmstate.ops.cpu.recurrent import counted, expect, function, optional, threads_for
from lmstate.ops.norm import Norm

DELTA = Struct("12P14q2d")
SSD = Struct("14P15q3d")

Carry = tuple[Tensor, Tensor]


class Given(NamedTuple):
    """What stands at the ends of a mixer: nothing where C makes it."""

    inputs: int = 0
    gate: int = 0
    y: int = 0
    strides: tuple[int, ...] = (0, 0, 0, 0)  # of rows and tokens: of the inputs, of the gate
    threads: int = 1


Fields = tuple[Carry, tuple[Tensor, ...], tuple[float, ...]]
"""The new carry, tensors that must live through the call, and the arguments."""


class Mixers:
    """The mixers of one variant; float32 tensors on the processor. Signatures as in the operations."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._delta = function(library, "lmstate_delta_mixer")
        self._ssd = function(library, "lmstate_ssd_mixer")

    def delta(
        self,
        inputs: Tensor,
        z: Tensor | None,
        carry: Carry,
        counts: Tensor,
        conv: Tensor,
        A: Tensor,
        dt_bias: Tensor,
        norm: Norm,
        key_heads: int,
        key_dim: int,
        silu: bool,
        beta_scale: float,
    ) -> tuple[Tensor, Carry]:
        """`delta_mixer`."""
        rows, tokens = inputs.shape[:2]
        inputs, z = _dense(inputs), None if z is None else _dense(z)
        expect(inputs, "the inputs", (rows, tokens, conv.shape[0] + A.shape[0] + dt_bias.shape[0]))
        y = torch.empty(rows, tokens, conv.shape[0] - 2 * key_heads * key_dim, dtype=torch.float32)
        given = Given(
            inputs.data_ptr(), _gate(z, y), y.data_ptr(), (*inputs.stride()[:2], *_steps(z)),
            threads_for(tokens * carry[1].numel()),
        )  # fmt: skip
        new, _held, fields = delta_fields(
            rows, tokens, given, carry, counts, conv, A, dt_bias, norm, key_heads, key_dim, silu, beta_scale
        )
        if self._delta(DELTA.pack(*fields)):
            raise MemoryError(f"no memory for {tokens} tokens of {conv.shape[0]} features in {rows} rows")
        return y, new

    def ssd(
        self,
        inputs: Tensor,
        gate: Tensor | None,
        carry: Carry,
        counts: Tensor,
        conv: Tensor,
        conv_bias: Tensor | None,
        A: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        head_dim: int,
        groups: int,
        dt_limits: tuple[float, float],
        norm: Norm | None,
        norm_groups: int,
        gate_last: bool,
    ) -> tuple[Tensor, Carry]:
        """`ssd_mixer`."""
        rows, tokens = inputs.shape[:2]
        inputs, gate = _dense(inputs), None if gate is None else _dense(gate)
        expect(inputs, "the inputs", (rows, tokens, conv.shape[0] + A.shape[0]))
        y = torch.empty(rows, tokens, A.shape[0] * head_dim, dtype=torch.float32)
        given = Given(
            inputs.data_ptr(), _gate(gate, y), y.data_ptr(), (*inputs.stride()[:2], *_steps(gate)),
            threads_for(tokens * carry[1].numel()),
        )  # fmt: skip
        new, _held, fields = ssd_fields(
            rows, tokens, given, carry, counts, conv, conv_bias, A, D, dt_bias, head_dim, groups, dt_limits, norm,
            norm_groups, gate_last,
        )  # fmt: skip
        if self._ssd(SSD.pack(*fields)):
            raise MemoryError(f"no memory for {tokens} tokens of {conv.shape[0]} features in {rows} rows")
        return y, new


def mixers(library: Library) -> Mixers:
    """The mixers of the same variant."""
    return _opened(library.variant)


@lru_cache
def _opened(variant: str) -> Mixers:
    return Mixers(ctypes.CDLL(str(cpu.path_of(variant))))


def delta_fields(
    rows: int,
    tokens: int,
    given: Given,
    carry: Carry,
    counts: Tensor,
    conv: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    norm: Norm,
    key_heads: int,
    key_dim: int,
    silu: bool,
    beta_scale: float,
) -> Fields:
    """The arguments of `delta_mixer`."""
    width, kernel = conv.shape
    heads, decays = A.shape[0], dt_bias.shape[0]
    values = width - 2 * key_heads * key_dim
    value_dim = values // heads
    if heads % key_heads or values % heads or decays not in (heads, heads * key_dim):
        raise ValueError(f"{heads} heads over {key_heads} of {key_dim} do not fit a convolution of {width} features")
    taps = conv.t().contiguous()
    tail, state, new_tail, new_state = _carries(carry, (rows, kernel - 1, width), (rows, heads, key_dim, value_dim))
    fields = (
        given.inputs, given.gate, tail.data_ptr(), state.data_ptr(), counted(counts, rows).data_ptr(),
        taps.data_ptr(), optional(A, "A", heads), optional(dt_bias, "the bias of dt", decays),
        optional(norm.weight, "the norm's weight", value_dim), given.y, new_tail.data_ptr(), new_state.data_ptr(),
        rows, tokens, key_heads, heads, key_dim, value_dim, kernel, decays > heads, silu, given.threads,
        *given.strides, beta_scale, norm.eps,
    )  # fmt: skip
    return (new_tail, new_state), (tail, state, taps), fields


def ssd_fields(
    rows: int,
    tokens: int,
    given: Given,
    carry: Carry,
    counts: Tensor,
    conv: Tensor,
    conv_bias: Tensor | None,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    head_dim: int,
    groups: int,
    dt_limits: tuple[float, float],
    norm: Norm | None,
    norm_groups: int,
    gate_last: bool,
) -> Fields:
    """The arguments of `ssd_mixer`."""
    width, kernel = conv.shape
    heads = A.shape[0]
    inner = heads * head_dim
    states = (width - inner) // (2 * groups)
    weights = 0 if norm is None else norm.weight.shape[0]
    if width != inner + 2 * groups * states or heads % groups:
        raise ValueError(f"{heads} heads of {head_dim} in {groups} groups do not fit a convolution of {width} features")
    if norm is not None and (inner % norm_groups or weights not in (inner, inner // norm_groups)):
        raise ValueError(f"{norm_groups} groups of {inner} features cannot have {weights} weights")
    taps = conv.t().contiguous()
    tail, state, new_tail, new_state = _carries(carry, (rows, kernel - 1, width), (rows, heads, head_dim, states))
    fields = (
        given.inputs, given.gate, tail.data_ptr(), state.data_ptr(), counted(counts, rows).data_ptr(),
        taps.data_ptr(), optional(conv_bias, "the convolution's bias", width), optional(A, "A", heads),
        optional(D, "D", heads), optional(dt_bias, "the bias of dt", heads),
        0 if norm is None else optional(norm.weight, "the norm's weight", weights), given.y, new_tail.data_ptr(),
        new_state.data_ptr(),
        rows, tokens, heads, head_dim, groups, states, kernel, norm_groups, weights, gate_last, given.threads,
        *given.strides, *dt_limits, 0.0 if norm is None else norm.eps,
    )  # fmt: skip
    return (new_tail, new_state), (tail, state, taps), fields


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _gate(gate: Tensor | None, y: Tensor) -> int:
    if gate is None:
        return 0
    expect(gate, "the gate", y.shape)
    return gate.data_ptr()


def _steps(gate: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if gate is None else gate.stride()[:2]


def _carries(carry: Carry, tail_shape: tuple[int, ...], state_shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The old tail and state, and room for the new ones."""
    tail, state = (part.contiguous() for part in carry)
    expect(tail, "the tail", tail_shape)
    expect(state, "the carry", state_shape)
    return tail, state, *(torch.empty(shape, dtype=torch.float32) for shape in (tail_shape, state_shape))
