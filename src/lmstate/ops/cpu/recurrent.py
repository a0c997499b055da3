"""The calls into the recurrences of a native library.

Inputs may be strided in all axes but the last, so that the parts of one projection need no copies. Every call returns
new tensors; the carry that it was given is only read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lmstate.ops.cpu import abi
from lmstate.ops.cpu.arguments import function
from lmstate.ops.types.params import Norm
from lmstate.ops.types.recurrences import DeltaOperands, RGLRUOperands, SelectiveScanOperands, SSDOperands

RUN = 32
"""Tokens that the bodies take at a time."""

# Below this many multiplications a second thread costs more than it saves.
_FEW = 32768


class RecurrentBodies:
    """The recurrent bodies of one variant; float32 tensors on the processor. Signatures as in the operations."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._causal_conv = function(library, "lmstate_causal_conv")
        self._gated_delta_rule = function(library, "lmstate_gated_delta_rule")
        self._ssd = function(library, "lmstate_ssd")
        self._selective_scan = function(library, "lmstate_selective_scan")
        self._rg_lru = function(library, "lmstate_rg_lru")
        self._gated_norm = function(library, "lmstate_gated_norm")

    def causal_conv(
        self, x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, silu: bool
    ) -> tuple[Tensor, Tensor]:
        """`causal_conv`; `weight` [F, C] is read in place if its taps are apart, as in `tap_major`."""
        rows, tokens, width = x.shape
        kernel = weight.shape[1]
        x, tail, taps = _dense(x), tail.contiguous(), weight.t().contiguous()
        expect(tail, "the tail", (rows, kernel - 1, width))
        expect(taps, "the taps", (kernel, width))
        y, new = _empty(rows, tokens, width), _empty(*tail.shape)
        arguments = abi.CAUSAL_CONV.pack(
            x=x.data_ptr(), tail=tail.data_ptr(), taps=taps.data_ptr(), bias=optional(bias, "the bias", width),
            counts=counted(counts, rows).data_ptr(), begins=0, y=y.data_ptr(), next=new.data_ptr(),
            rows=rows, tokens=tokens, width=width, kernel=kernel, silu=silu, threads=threads_for(kernel * y.numel()),
            x_row=x.stride(0), x_token=x.stride(1), tail_row=tail.stride(0), marks=0, marked=0,
        )  # fmt: skip
        self._causal_conv(arguments)
        return y, new

    def gated_delta_rule(self, operands: DeltaOperands) -> tuple[Tensor, Tensor]:
        """`gated_delta_rule`. Without beta nothing is corrected: a decayed sum of k v^T (and g a number a head)."""
        q, k, v, g, beta, carry, counts, scale, normalize = operands
        rows, tokens, key_heads, key_dim = k.shape
        heads, value_dim = v.shape[2:]
        q, k, v, carry = _dense(q), _dense(k), _dense(v), carry.contiguous()
        by_channel = g.dim() == 4
        g = _dense(g) if by_channel else g
        if q.shape != k.shape or v.shape[:2] != (rows, tokens) or heads % key_heads:
            raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together")
        expect(g, "the log decay", (rows, tokens, heads, key_dim) if by_channel else (rows, tokens, heads))
        expect(carry, "the carry", (rows, heads, key_dim, value_dim))
        if beta is not None:
            expect(beta, "beta", (rows, tokens, heads))
        y, new = _empty(rows, tokens, heads, value_dim), _empty(*carry.shape)
        beta_row, beta_token, beta_head = (0, 0, 0) if beta is None else beta.stride()
        arguments = abi.GATED_DELTA_RULE.pack(
            q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), g=g.data_ptr(), beta=0 if beta is None else beta.data_ptr(),
            carry=carry.data_ptr(), counts=counted(counts, rows).data_ptr(), begins=0, y=y.data_ptr(),
            next=new.data_ptr(), rows=rows, tokens=tokens, key_heads=key_heads, heads=heads, key_dim=key_dim,
            value_dim=value_dim, by_channel=by_channel, normalize=normalize,
            threads=threads_for(tokens * new.numel()), q_row=q.stride(0), q_token=q.stride(1), q_head=q.stride(2),
            k_row=k.stride(0), k_token=k.stride(1), k_head=k.stride(2), v_row=v.stride(0), v_token=v.stride(1),
            v_head=v.stride(2), g_row=g.stride(0), g_token=g.stride(1), g_head=g.stride(2), beta_row=beta_row,
            beta_token=beta_token, beta_head=beta_head, carry_row=carry.stride(0), scale=scale, A=0, bias=0,
            beta_scale=1.0, norm=0, marks=0, marked=0, conv=0,
        )  # fmt: skip
        if self._gated_delta_rule(arguments):
            raise MemoryError(f"no memory for the delta rule's runs of heads of {key_dim}")
        return y, new

    def ssd(self, operands: SSDOperands) -> tuple[Tensor, Tensor]:
        """`ssd`."""
        x, dt, A, B, C, D, carry, counts, dt_bias, dt_limits = operands
        rows, tokens, heads, head_dim = x.shape
        groups, states = B.shape[2:]
        x, B, C, A, carry = _dense(x), _dense(B), _dense(C), A.contiguous(), carry.contiguous()
        if B.shape != C.shape or B.shape[:2] != (rows, tokens) or heads % groups:
            raise ValueError(f"x {list(x.shape)}, B {list(B.shape)} and C {list(C.shape)} do not fit together")
        expect(dt, "dt", (rows, tokens, heads))
        expect(A, "A", (heads,))
        expect(carry, "the carry", (rows, heads, head_dim, states))
        y, new = _empty(rows, tokens, heads, head_dim), _empty(*carry.shape)
        arguments = abi.SSD.pack(
            x=x.data_ptr(), dt=dt.data_ptr(), A=A.data_ptr(), B=B.data_ptr(), C=C.data_ptr(), D=optional(D, "D", heads),
            bias=optional(dt_bias, "dt's bias", heads), carry=carry.data_ptr(),
            counts=counted(counts, rows).data_ptr(), begins=0, y=y.data_ptr(), next=new.data_ptr(), rows=rows,
            tokens=tokens, heads=heads, head_dim=head_dim, groups=groups, states=states,
            threads=threads_for(tokens * new.numel()), x_row=x.stride(0), x_token=x.stride(1), x_head=x.stride(2),
            dt_row=dt.stride(0), dt_token=dt.stride(1), dt_head=dt.stride(2), B_row=B.stride(0), B_token=B.stride(1),
            B_group=B.stride(2), C_row=C.stride(0), C_token=C.stride(1), C_group=C.stride(2),
            carry_row=carry.stride(0), low=dt_limits[0], high=dt_limits[1], marks=0, marked=0,
        )  # fmt: skip
        self._ssd(arguments)
        return y, new

    def selective_scan(self, operands: SelectiveScanOperands) -> tuple[Tensor, Tensor]:
        """`selective_scan`."""
        x, dt, A, B, C, D, carry, counts, softplus, gate = operands
        rows, tokens, channels = x.shape
        states = B.shape[2]
        x, dt, B, C, A, carry = _dense(x), _dense(dt), _dense(B), _dense(C), A.contiguous(), carry.contiguous()
        expect(dt, "dt", (rows, tokens, channels))
        gate = None if gate is None else _dense(gate)
        if gate is not None:
            expect(gate, "the gate", (rows, tokens, channels))
        expect(B, "B", (rows, tokens, states))
        expect(C, "C", (rows, tokens, states))
        expect(A, "A", (channels, states))
        expect(carry, "the carry", (rows, channels, states))
        y, new = _empty(rows, tokens, channels), _empty(*carry.shape)
        arguments = abi.SELECTIVE_SCAN.pack(
            x=x.data_ptr(), dt=dt.data_ptr(), gate=0 if gate is None else gate.data_ptr(), A=A.data_ptr(),
            B=B.data_ptr(), C=C.data_ptr(), D=optional(D, "D", channels), carry=carry.data_ptr(),
            counts=counted(counts, rows).data_ptr(), y=y.data_ptr(), next=new.data_ptr(), rows=rows, tokens=tokens,
            channels=channels, states=states, softplus=softplus, threads=threads_for(8 * tokens * new.numel()),
            x_row=x.stride(0), x_token=x.stride(1), gate_row=0 if gate is None else gate.stride(0),
            gate_token=0 if gate is None else gate.stride(1), dt_row=dt.stride(0), dt_token=dt.stride(1),
            B_row=B.stride(0), B_token=B.stride(1), C_row=C.stride(0), C_token=C.stride(1), carry_row=carry.stride(0),
        )  # fmt: skip
        self._selective_scan(arguments)
        return y, new

    def rg_lru(self, operands: RGLRUOperands) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`rg_lru`."""
        x, input_gate, recurrence_gate, recurrent_param, h, seen, counts = operands
        rows, tokens, width = x.shape
        h, seen = h.contiguous(), seen.contiguous()
        x, input_gate, recurrence_gate = _dense(x), _dense(input_gate), _dense(recurrence_gate)
        expect(input_gate, "the input gate", (rows, tokens, width))
        expect(recurrence_gate, "the recurrence gate", (rows, tokens, width))
        expect(h, "h", (rows, width))
        expect(seen, "seen", (rows,))
        y, new, new_seen = _empty(rows, tokens, width), _empty(rows, width), _empty(rows)
        arguments = abi.RG_LRU.pack(
            x=x.data_ptr(), input_gate=input_gate.data_ptr(), recurrence_gate=recurrence_gate.data_ptr(),
            parameter=optional(recurrent_param, "the parameter", width), h=h.data_ptr(), seen=seen.data_ptr(),
            counts=counted(counts, rows).data_ptr(), y=y.data_ptr(), next=new.data_ptr(),
            next_seen=new_seen.data_ptr(), rows=rows, tokens=tokens, width=width, threads=threads_for(16 * y.numel()),
            x_row=x.stride(0), x_token=x.stride(1), input_row=input_gate.stride(0), input_token=input_gate.stride(1),
            recurrence_row=recurrence_gate.stride(0), recurrence_token=recurrence_gate.stride(1),
        )  # fmt: skip
        self._rg_lru(arguments)
        return y, (new, new_seen)

    def gated_norm(
        self, y: Tensor, gate: Tensor, norm: Norm | None, silu: bool, groups: int = 1, gate_last: bool = False
    ) -> Tensor:
        """`gated_norm`, or without a norm `gated`."""
        rows, tokens, width = y.shape
        y, gate, weights = y.contiguous(), _dense(gate), width if norm is None else norm.weight.shape[0]
        if width % groups or weights not in (width, width // groups):
            raise ValueError(f"{groups} groups of {width} features cannot have {weights} weights")
        expect(gate, "the gate", (rows, tokens, width))
        weight = 0 if norm is None else optional(norm.weight, "the norm's weight", weights)
        out = _empty(rows, tokens, width)
        arguments = abi.GATED_NORM.pack(
            y=y.data_ptr(), gate=gate.data_ptr(), weight=weight, out=out.data_ptr(), counts=0, rows=rows,
            tokens=tokens, groups=groups, width=width // groups, weights=weights, silu=silu, gate_last=gate_last,
            threads=threads_for(4 * out.numel()), gate_row=gate.stride(0), gate_token=gate.stride(1),
            eps=norm.eps if norm else 0.0,
        )  # fmt: skip
        self._gated_norm(arguments)
        return out


def all_float32(*tensors: Tensor | None) -> bool:
    """Whether the bodies, which know no other dtype, can take these."""
    # No `all` with a generator: it takes twice as long, and a step asks hundreds of times.
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None and tensor.dtype != torch.float32:
            return False
    return True


def threads_for(work: int) -> int:
    return torch.get_num_threads() if work > _FEW else 1


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def expect(x: Tensor, name: str, shape: Sequence[int]) -> None:
    if x.shape != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)}; this is {list(x.shape)}")


def optional(x: Tensor | None, name: str, width: int) -> int:
    if x is None:
        return 0
    expect(x, name, (width,))
    if x.stride(0) != 1 and width > 1:
        raise ValueError(f"{name} must be contiguous; its stride is {x.stride(0)}")
    return x.data_ptr()


def counted(counts: Tensor, rows: int) -> Tensor:
    if counts.shape != (rows,) or counts.dtype != torch.int64 or not counts.is_cpu or not counts.is_contiguous():
        raise ValueError(
            f"counts must be contiguous int64 [{rows}] on the processor, not {counts.dtype} {counts.shape}"
        )
    return counts
