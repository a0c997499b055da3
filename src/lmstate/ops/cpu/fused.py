"""The call that runs halves of blocks as one body, checked as in `library`: C may trust what it is given."""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmstate.ops.attend_quantized import Held
from lmstate.ops.cpu.arguments import (
    KINDS,
    MAX_HEAD_DIM,
    WEIGHT_KINDS,
    check_attended,
    factor,
    float_pointer,
    function,
    integers,
    norm_fields,
    optional_pointer,
)
from lmstate.ops.cpu.codes import check_held
from lmstate.ops.norm import Norm

if TYPE_CHECKING:
    from lmstate.ops.halves import AttentionHalf, FeedForwardHalf
    from lmstate.ops.rotate_attend import Rotation
    from lmstate.ops.run import Rings, Waiting

_ATTENTION = Struct("q10P12q8d")
_STARTS = Struct("P")
_RINGS = Struct("4P11q4P2q")
_ROTATION = Struct("2P2q")
_FEED_FORWARD = Struct("q7P7q3d")
_RUN = Struct("5P4q")

HALF = _ATTENTION.size + _STARTS.size + _RINGS.size + _ROTATION.size
"""Bytes that the arguments of a half take; those of attention are the longest."""


class Fused:
    """The body of one variant, and its arguments. Tensors are float32 on the processor."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = function(library, "lmstate_run")

    def attention(self, half: AttentionHalf) -> bytes:
        """The start of the arguments of attention, before those of its starts, its rings and its rotation."""
        parts, norm = half.parts, half.norm
        heads, kv_heads, dim, qkv, out = parts.heads, parts.kv_heads, parts.head_dim, parts.qkv, parts.out
        width, inputs, outputs = qkv.out_features, qkv.in_features, out.out_features
        stored = 0 if parts.reads is not None else kv_heads
        if (
            width != (heads * (2 if parts.gate else 1) + 2 * stored) * dim + parts.gates
            or out.in_features != heads * dim
        ):
            raise ValueError(f"projections {qkv} and {out} do not fit {heads} heads of {dim}")
        q_norm, q_width, q_eps = _head_norm(parts.q_norm, dim, heads)
        k_norm, k_width, k_eps = _head_norm(parts.k_norm, dim, kv_heads)
        v_norm, _, v_eps = _head_norm(parts.v_norm, dim, 1)
        return _ATTENTION.pack(
            0, *norm_fields(norm, inputs)[:1], qkv.storage.data_ptr(),
            optional_pointer(parts.qkv_bias, "the bias of qkv", (width,)), q_norm, k_norm, v_norm,
            optional_pointer(parts.sinks, "sinks", (heads,)), out.storage.data_ptr(),
            optional_pointer(parts.out_bias, "the bias of out", (outputs,)), norm_fields(half.after, outputs)[0],
            inputs, outputs, heads, kv_heads, dim, parts.gate, q_width, k_width, WEIGHT_KINDS[qkv.kind],
            WEIGHT_KINDS[out.kind], parts.reads is not None, parts.gates, norm_fields(norm, inputs)[1], q_eps,
            k_eps, v_eps, parts.scale, parts.softcap or 0.0, norm_fields(half.after, outputs)[1], factor(half.scale),
        )  # fmt: skip

    def starts(self, starts: Tensor | None, rows: int) -> bytes:
        """The arguments of attention that say where a layer's tokens start, if not where the step's do."""
        return _STARTS.pack(0 if starts is None else integers(starts, "starts", rows).data_ptr())

    def knows(self, rings: Rings) -> bool:
        """Whether a layer with these rings may run here."""
        k, v, dim, coded = rings.k, rings.v, rings.heads[2], rings.coded
        if not (k.is_cpu and k.dtype == v.dtype and k.shape[3] == v.shape[3] and dim <= MAX_HEAD_DIM and dim % 4 == 0):
            return False
        if coded is not None:
            return coded.tail is None or coded.tail.dtype in KINDS
        return k.dtype in KINDS and k.stride(3) == v.stride(3) == 1

    def rings(self, rings: Rings) -> bytes:
        """The arguments that keys and values are; pointers to what `rings` holds, but for its starts."""
        (window, chunk), columns, coded = rings.sight, rings.columns, rings.coded
        (rows, kv_heads, dim), slots = rings.heads, rings.k.shape[2]
        if rings.k.shape != rings.v.shape:
            raise ValueError(f"keys {list(rings.k.shape)} and values {list(rings.v.shape)} do not fit each other")
        floats: tuple[Tensor | None, Tensor | None] = (rings.k, rings.v)
        codes: tuple[int, ...] = (0,) * 6
        if coded is not None:
            held = Held(rings.k, rings.v, coded.k_scale, coded.v_scale)
            check_held(held, coded.tail, (rows, kv_heads), dim, dim, coded.bits)
            floats, tail = (coded.tail, None), 0 if coded.tail is None else coded.tail.shape[2]
            codes = (*(x.data_ptr() for x in held), coded.bits, tail)
        kind = 0 if floats[0] is None else KINDS[floats[0].dtype]
        planes = 0 if columns is None else columns.shape[2]
        queries = 0 if rings.queries is None else float_pointer(rings.queries, "queries", tuple(rings.queries.shape))
        return _RINGS.pack(
            *(0 if x is None else x.data_ptr() for x in floats),
            optional_pointer(columns, "columns", (rows, kv_heads, planes, slots)), queries,
            slots, *(n for x in floats for n in ((0, 0, 0) if x is None else x.stride()[:3])), planes, kind,
            window or 0, chunk or 0, *codes,
        )  # fmt: skip

    def rotation(self, rotation: Rotation | None, rows: int, tokens: int) -> bytes:
        """The end of the arguments of attention."""
        if rotation is None:
            return _ROTATION.pack(0, 0, 0, 0)
        half = rotation.cos.shape[-1]
        cos, sin = (float_pointer(table, "cos and sin", (rows, tokens, half)) for table in rotation[:2])
        return _ROTATION.pack(cos, sin, half, rotation.interleaved)

    def check(self, half: AttentionHalf, rings: Rings, rotation: Rotation | None, rows: int, tokens: int) -> None:
        """ValueError where these do not go together."""
        heads, kv_heads, dim = half.heads
        if rings.heads != (rows, kv_heads, dim):
            raise ValueError(
                f"rings of {rings.heads[0]} rows, {rings.heads[1]} heads of {rings.heads[2]} do not fit {rows} rows, "
                f"{kv_heads} heads of {dim}"
            )
        if rotation is not None and 2 * rotation.cos.shape[-1] > dim:
            raise ValueError(f"a head of {dim} has no {2 * rotation.cos.shape[-1]} features to rotate")
        if rings.queries is not None and rings.queries.shape != (rows, tokens, heads, dim):
            raise ValueError(f"{list(rings.queries.shape)} has no room for {tokens} queries of {heads} heads")

    def feed_forward(self, half: FeedForwardHalf, gate: int) -> bytes:
        """The arguments of a feed-forward part with a gate of `Library.GATES`."""
        up, down = half.up, half.down
        inputs, hidden, outputs = up.in_features, down.in_features, down.out_features
        if up.out_features != 2 * hidden:
            raise ValueError(f"{up} and {down} do not fit each other")
        norm, eps = norm_fields(half.norm, inputs)
        after, after_eps = norm_fields(half.after, outputs)
        return _FEED_FORWARD.pack(
            1, norm, up.storage.data_ptr(), optional_pointer(half.up_bias, "the bias of up", (2 * hidden,)),
            down.storage.data_ptr(), optional_pointer(half.down_bias, "the bias of down", (outputs,)), after,
            optional_pointer(half.factors, "the factors of up", (2 * hidden,)),
            inputs, hidden, outputs, WEIGHT_KINDS[up.kind], WEIGHT_KINDS[down.kind], gate, half.parallel,
            eps, after_eps, factor(half.scale),
        ).ljust(HALF, b"\0")  # fmt: skip

    def run(
        self, x: Tensor, residual: Tensor | None, starts: Tensor | None, counts: Tensor | None, waiting: Waiting
    ) -> Tensor:
        """x `[R, T, E]` through the halves, in one parallel region."""
        (rows, tokens, _), halves = x.shape, waiting.halves
        stream = x.contiguous()
        y = torch.empty(rows, tokens, halves[-1].outputs, dtype=torch.float32)
        beside = stream if residual is x else residual
        added = optional_pointer(beside, "the residual", (rows, tokens, halves[0].outputs))
        if starts is not None and counts is not None:
            starts, counts = integers(starts, "starts", rows), integers(counts, "counts", rows)
        arguments = _RUN.pack(
            stream.data_ptr(), added, y.data_ptr(), 0 if starts is None else starts.data_ptr(),
            0 if counts is None else counts.data_ptr(), rows, tokens, len(halves), torch.get_num_threads(),
        )  # fmt: skip
        status = self._run(b"".join([arguments, *waiting.arguments]))
        if status:
            each, failed = divmod(status, len(halves)) if status > 0 else (status, 0)
            rings = waiting.rings.get(failed)
            if each < 0 or rings is None or starts is None or counts is None:
                raise MemoryError(f"no memory for the activations of {rows} rows of {tokens} tokens")
            check_attended(each, x, rings.k, starts if rings.starts is None else rings.starts, counts)
        return y


def _head_norm(norm: Norm | None, dim: int, heads: int) -> tuple[int, int, float]:
    """Pointer, width and epsilon of a norm of each head or of all heads side by side."""
    if norm is None:
        return 0, 0, 0.0
    width = norm.weight.numel()
    if width not in (dim, heads * dim):
        raise ValueError(f"a norm of {width} features fits neither a head of {dim} nor {heads} of them")
    return float_pointer(norm.weight, "the norm's weight", (width,)), width, norm.eps
