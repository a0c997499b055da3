"""The calls into the halves of a block that run as one body, checked as in `library`: C may trust what it is given."""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmstate.ops.cpu.arguments import (
    KINDS,
    WEIGHT_KINDS,
    check_attended,
    float_pointer,
    function,
    integers,
    joining,
    optional_pointer,
)
from lmstate.ops.norm import Norm
from lmstate.ops.residual import Residual
from lmstate.ops.weight import Weight

if TYPE_CHECKING:
    from lmstate.ops.attention import AttentionParts, Rings
    from lmstate.ops.rotate_attend import Rotation

_ATTENTION = Struct("20P26q7d")
_FEED_FORWARD = Struct("9P8q3d")


class Fused:
    """The bodies of one variant. Tensors are float32 on the processor; every call returns new ones, contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attention = function(library, "lmstate_attention")
        self._feed_forward = function(library, "lmstate_feed_forward")

    def attention(
        self,
        x: Tensor,
        parts: AttentionParts,
        rotation: Rotation | None,
        rings: Rings,
        starts: Tensor,
        counts: Tensor,
        norm: Norm | None,
        residual: Residual | None,
    ) -> Tensor:
        """`ops.fused_attention`; q and k norms are rms, of each head or of all."""
        rows, tokens, inputs = x.shape
        heads, kv_heads, dim = parts.heads, parts.kv_heads, parts.head_dim
        qkv, out, k, v = parts.qkv, parts.out, rings.k, rings.v
        width = (heads * (2 if parts.gate else 1) + 2 * kv_heads) * dim
        slots, (window, chunk), columns = k.shape[2], rings.sight, rings.columns
        planes = 0 if columns is None else columns.shape[2]
        if qkv.shape != (width, inputs) or out.in_features != heads * dim:
            raise ValueError(f"projections {qkv} and {out} do not fit x {list(x.shape)}, {heads} heads of {dim}")
        if not k.shape == v.shape == (rows, kv_heads, slots, dim):
            raise ValueError(f"rings k {list(k.shape)}, v {list(v.shape)} do not fit {rows} rows, {kv_heads} heads")
        starts = integers(rings.starts if rings.starts is not None else starts, "starts", rows)
        x, counts = x.contiguous(), integers(counts, "counts", rows)
        y = torch.empty(rows, tokens, out.out_features, dtype=torch.float32)
        n, half, interleaved = 0, 0, False
        n_eps, cos, sin = 0.0, 0, 0
        if rotation is not None:
            half, interleaved = rotation.cos.shape[-1], rotation.interleaved
            if 2 * half > dim:
                raise ValueError(f"a head of {dim} has no {2 * half} features to rotate")
            cos, sin = (float_pointer(table, "cos and sin", (rows, tokens, half)) for table in rotation[:2])
        if norm is not None:
            n, n_eps = float_pointer(norm.weight, "the norm's weight", (inputs,)), norm.eps
        q_norm, q_width, q_eps = _head_norm(parts.q_norm, dim, heads)
        k_norm, k_width, k_eps = _head_norm(parts.k_norm, dim, kv_heads)
        stream = 0 if residual is None else float_pointer(residual.stream, "the residual", y.shape)
        after, after_eps, factor = joining(residual, out.out_features)
        arguments = _ATTENTION.pack(
            x.data_ptr(), n, qkv.storage.data_ptr(), optional_pointer(parts.qkv_bias, "the bias of qkv", (width,)),
            q_norm, k_norm, cos, sin, k.data_ptr(), v.data_ptr(), starts.data_ptr(), counts.data_ptr(),
            optional_pointer(parts.sinks, "sinks", (heads,)), out.storage.data_ptr(),
            optional_pointer(parts.out_bias, "the bias of out", (out.out_features,)),
            stream, after, y.data_ptr(),
            optional_pointer(columns, "columns", (rows, kv_heads, planes, slots)),
            optional_pointer(rings.queries, "queries", (rows, tokens, heads, dim)),
            rows, tokens, inputs, out.out_features, heads, kv_heads, dim, half, interleaved, parts.gate,
            q_width, k_width, slots, *k.stride()[:3], *v.stride()[:3],
            planes, KINDS[k.dtype], WEIGHT_KINDS[qkv.kind], WEIGHT_KINDS[out.kind], window or 0, chunk or 0,
            torch.get_num_threads(), n_eps, q_eps, k_eps, parts.scale, parts.softcap or 0.0,
            after_eps, factor,
        )  # fmt: skip
        check_attended(self._attention(arguments), x, k, starts, counts)
        return y

    def feed_forward(
        self,
        x: Tensor,
        up: Weight,
        down: Weight,
        gate: int,
        norm: Norm | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        residual: Residual | None,
    ) -> Tensor:
        """`ops.feed_forward` with a gate of `Library.GATES` and, at most, an rms norm."""
        inputs, hidden, outputs = up.in_features, down.in_features, down.out_features
        if x.shape[-1] != inputs or up.out_features != 2 * hidden:
            raise ValueError(f"{up} and {down} do not fit each other and x {list(x.shape)}")
        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], outputs, dtype=torch.float32)
        n, eps = (0, 0.0) if norm is None else (float_pointer(norm.weight, "the norm's weight", (inputs,)), norm.eps)
        rows = x.numel() // inputs
        stream = 0 if residual is None else float_pointer(residual.stream, "the residual", y.shape)
        after, after_eps, factor = joining(residual, outputs)
        arguments = _FEED_FORWARD.pack(
            x.data_ptr(), n, up.storage.data_ptr(), optional_pointer(up_bias, "the bias of up", (2 * hidden,)),
            down.storage.data_ptr(), optional_pointer(down_bias, "the bias of down", (outputs,)),
            stream, after, y.data_ptr(),
            rows, inputs, hidden, outputs, WEIGHT_KINDS[up.kind], WEIGHT_KINDS[down.kind], gate,
            torch.get_num_threads(), eps, after_eps, factor,
        )  # fmt: skip
        if self._feed_forward(arguments):
            raise MemoryError(f"no memory for the activations of {rows} rows of {hidden}")
        return y


def _head_norm(norm: Norm | None, dim: int, heads: int) -> tuple[int, int, float]:
    """Pointer, width and epsilon of a norm of each head or of all heads side by side."""
    if norm is None:
        return 0, 0, 0.0
    width = norm.weight.numel()
    if width not in (dim, heads * dim):
        raise ValueError(f"a norm of {width} features fits neither a head of {dim} nor {heads} of them")
    return float_pointer(norm.weight, "the norm's weight", (width,)), width, norm.eps
