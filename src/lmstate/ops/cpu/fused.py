"""The call that runs sublayers as one body."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lmstate.ops.cpu import abi, fused_moe, fused_recurrent
from lmstate.ops.cpu.abi import GATES, KINDS, MAX_HEAD_DIM, SUBLAYER_BYTES, WEIGHT_KINDS, SublayerKind
from lmstate.ops.cpu.arguments import (
    check_attended,
    check_quantized_kv,
    codes_fields,
    factor,
    float_pointer,
    function,
    integers,
    norm_fields,
    optional_pointer,
    simple,
    table_pointers,
    table_shape,
)
from lmstate.ops.cpu.fused_recurrent import Recurrence
from lmstate.ops.types.block_table import Stored
from lmstate.ops.types.params import Norm
from lmstate.ops.types.sublayers import (
    AttentionSublayer,
    MLPSublayer,
    MoESublayer,
    RecurrentSublayer,
    RouterParams,
    Sublayer,
    pointers,
    requires_grad,
)

if TYPE_CHECKING:
    from lmstate.ops.types.params import KVView, RopeTables


class _Packed(NamedTuple):
    arguments: bytes | Recurrence | None
    pointers: Sequence[int] = ()


class Fused:
    """The body of one variant, and its arguments. Tensors are float32 on the processor."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = function(library, "lmstate_fused")
        self._choose_experts = function(library, "lmstate_choose_experts")
        self._packed: WeakKeyDictionary[Sublayer, _Packed] = WeakKeyDictionary()

    @overload
    def pack(self, sublayer: RecurrentSublayer) -> Recurrence | None: ...
    @overload
    def pack(self, sublayer: AttentionSublayer | MLPSublayer | MoESublayer) -> bytes | None: ...
    @overload
    def pack(self, sublayer: Sublayer) -> bytes | Recurrence | None: ...

    def pack(self, sublayer: Sublayer) -> bytes | Recurrence | None:
        """The arguments that do not change from step to step, packed once for as long as its tensors stay in place.

        None where no native body runs it: a norm that they do not know, another device, a gradient to follow.
        """
        if torch.is_grad_enabled() and any(map(requires_grad, sublayer.tensors())):
            return None
        return self.constants(sublayer)

    def constants(self, sublayer: Sublayer) -> bytes | Recurrence | None:
        """The same, also where a gradient is to follow."""
        tensors = sublayer.tensors()
        at, known = pointers(tensors), self._packed.get(sublayer)
        if known is None or known.pointers != at:
            packed = _pack(sublayer) if all(tensor.is_cpu for tensor in tensors) else _Packed(None)
            known = self._packed[sublayer] = packed._replace(pointers=at)
        return known.arguments

    def starts(self, starts: Tensor | None, rows: int) -> bytes:
        """The arguments of attention that say where a layer's tokens start, if not where the step's do."""
        return abi.STARTS.pack(0 if starts is None else integers(starts, "starts", rows).data_ptr())

    def knows(self, view: KVView) -> bool:
        """Whether a layer with this view may run here."""
        k, v, dim, quantized = view.k, view.v, view.heads[2], view.quantized
        if not (k.is_cpu and k.dtype == v.dtype and k.shape[3] == v.shape[3] and dim <= MAX_HEAD_DIM and dim % 4 == 0):
            return False
        if quantized is not None:
            return quantized.tail is None or quantized.tail.dtype in KINDS
        return k.dtype in KINDS and k.stride(3) == v.stride(3) == 1

    def view(self, view: KVView) -> bytes:
        """The arguments that keys and values are; pointers to what `rings` holds, but for its starts."""
        (window, chunk), columns, quantized = view.mask, view.columns, view.quantized
        (rows, kv_heads, dim), slots = view.heads, view.k.shape[2]
        if view.k.shape != view.v.shape:
            raise ValueError(f"keys {list(view.k.shape)} and values {list(view.v.shape)} do not fit each other")
        floats: tuple[Stored | None, Stored | None] = (view.k, view.v)
        codes: tuple[int, ...] = (0,) * len(abi.CODES.fields)
        if quantized is not None:
            check_quantized_kv(quantized, (rows, kv_heads), dim, dim)
            floats, codes = (quantized.tail, None), codes_fields(quantized)
        kind = 0 if floats[0] is None else KINDS[floats[0].dtype]
        planes = 0 if columns is None else columns.shape[2]
        queries = 0 if view.queries is None else float_pointer(view.queries, "queries", tuple(view.queries.shape))
        return abi.KV_VIEW.pack(
            *(0 if x is None else x.data_ptr() for x in floats),
            optional_pointer(columns, "columns", (rows, kv_heads, planes, slots)), queries, *table_pointers(*floats),
            slots, *(n for x in floats for n in ((0, 0, 0) if x is None else x.stride()[:3])),
            *table_shape(floats[0]), planes, kind, window or 0, chunk or 0, *codes,
        )  # fmt: skip

    def rotation(self, rotation: RopeTables | None, rows: int, tokens: int) -> bytes:
        """The end of the arguments of attention."""
        if rotation is None:
            return abi.ROTATION.pack(0, 0, 0, 0, 0)
        *outer, half = rotation.cos.shape
        by_position = len(outer) == 1
        shape = (*outer, half) if by_position else (rows, tokens, half)
        cos, sin = (float_pointer(table, "cos and sin", shape) for table in rotation[:2])
        return abi.ROTATION.pack(cos, sin, half, rotation.interleaved, outer[0] if by_position else 0)

    def check(self, half: AttentionSublayer, view: KVView, rotation: RopeTables | None, rows: int, tokens: int) -> None:
        """ValueError where these do not go together."""
        heads, kv_heads, dim = half.heads, half.kv_heads, half.head_dim
        if view.heads != (rows, kv_heads, dim):
            raise ValueError(
                f"rings of {view.heads[0]} rows, {view.heads[1]} heads of {view.heads[2]} do not fit {rows} rows, "
                f"{kv_heads} heads of {dim}"
            )
        if rotation is not None and 2 * rotation.cos.shape[-1] > dim:
            raise ValueError(f"a head of {dim} has no {2 * rotation.cos.shape[-1]} features to rotate")
        if view.queries is not None and view.queries.shape != (rows, tokens, heads, dim):
            raise ValueError(f"{list(view.queries.shape)} has no room for {tokens} queries of {heads} heads")

    def run(
        self,
        x: Tensor,
        residual: Tensor | None,
        starts: Tensor | None,
        counts: Tensor | None,
        sublayers: Sequence[Sublayer],
        arguments: Sequence[bytes],
        views: Mapping[int, KVView],
        keep: Sequence[int] | None = None,
    ) -> Tensor:
        """x `[R, T, E]` through the sublayers, in one parallel region; `views` by their places among them.

        keep: as of `FusedGraph.flush`.
        """
        rows, tokens, _ = x.shape
        stream = x.contiguous()
        kept, keep_t = tokens, None
        if keep is not None:
            assert starts is not None and counts is not None
            kept, keep_t = max(keep), torch.tensor(keep, dtype=torch.int64)
            integers(keep_t, "the numbers of tokens to keep", rows)
            if not bool((keep_t >= 0).all() and (keep_t <= counts).all()):
                raise ValueError(f"{keep} last tokens of rows of {counts.tolist()} were to be kept")
        y = torch.empty(rows, kept, sublayers[-1].out_features, dtype=torch.float32)
        beside = stream if residual is x else residual
        added = optional_pointer(beside, "the residual", (rows, tokens, sublayers[0].out_features))
        if starts is not None and counts is not None:
            starts, counts = integers(starts, "starts", rows), integers(counts, "counts", rows)
        head = abi.FUSED.pack(
            stream.data_ptr(), added, y.data_ptr(), 0 if starts is None else starts.data_ptr(),
            0 if counts is None else counts.data_ptr(), 0 if keep_t is None else keep_t.data_ptr(),
            rows, tokens, len(sublayers), torch.get_num_threads(), kept,
        )  # fmt: skip
        status = self._run(b"".join([head, *arguments]))
        if status:
            each, failed = divmod(status, len(sublayers)) if status > 0 else (status, 0)
            view = views.get(failed)
            if each < 0 or view is None or starts is None or counts is None:
                raise MemoryError(f"no memory for the activations of {rows} rows of {tokens} tokens")
            check_attended(each, x, view.k, starts if view.starts is None else view.starts, counts)
        return y

    def choose_experts(self, logits: Tensor, router: RouterParams) -> tuple[Tensor, Tensor]:
        """`ops.choose_experts`."""
        return fused_moe.choose_experts(self._choose_experts, logits, router)


def _pack(sublayer: Sublayer) -> _Packed:
    match sublayer:
        case AttentionSublayer():
            return _Packed(_pack_attention(sublayer))
        case MLPSublayer():
            return _Packed(_pack_mlp(sublayer))
        case MoESublayer():
            return _Packed(fused_moe.pack(sublayer))
        case RecurrentSublayer():
            return _Packed(fused_recurrent.pack(sublayer))
    raise TypeError(f"no native body runs a {type(sublayer).__name__}")


def _pack_attention(of: AttentionSublayer) -> bytes | None:
    """The start of the arguments of attention, before those of its starts, its rings and its rotation."""
    if not simple(of.norm, of.post_norm, of.q_norm, of.k_norm, of.v_norm):
        return None
    heads, kv_heads, dim, qkv, out = of.heads, of.kv_heads, of.head_dim, of.qkv, of.out
    width, inputs, outputs = qkv.out_features, qkv.in_features, out.out_features
    stored = 0 if of.shared_kv else kv_heads
    expected = (heads * (2 if of.gate else 1) + 2 * stored) * dim + of.gates
    if width != expected or out.in_features != heads * dim:
        raise ValueError(f"projections {qkv} and {out} do not fit {heads} heads of {dim}")
    q_norm, q_width, q_eps = _head_norm(of.q_norm, dim, heads)
    k_norm, k_width, k_eps = _head_norm(of.k_norm, dim, kv_heads)
    v_norm, _, v_eps = _head_norm(of.v_norm, dim, 1)
    arguments = abi.ATTENTION_WEIGHTS.pack(
        *norm_fields(of.norm, inputs)[:1], qkv.storage.data_ptr(),
        optional_pointer(of.qkv_bias, "the bias of qkv", (width,)), q_norm, k_norm, v_norm,
        optional_pointer(of.params.sinks, "sinks", (heads,)), out.storage.data_ptr(),
        optional_pointer(of.out_bias, "the bias of out", (outputs,)), norm_fields(of.post_norm, outputs)[0],
        inputs, outputs, heads, kv_heads, dim, of.gate, q_width, k_width, WEIGHT_KINDS[qkv.kind],
        WEIGHT_KINDS[out.kind], of.shared_kv, of.gates, norm_fields(of.norm, inputs)[1], q_eps,
        k_eps, v_eps, of.params.scale, of.params.softcap or 0.0, norm_fields(of.post_norm, outputs)[1],
        factor(of.scale),
    )  # fmt: skip
    return abi.sublayer(SublayerKind.ATTENTION, arguments)


def _pack_mlp(of: MLPSublayer) -> bytes | None:
    """The arguments of an MLP."""
    if of.act not in GATES or not simple(of.norm, of.post_norm):
        return None
    up, down = of.up, of.down
    inputs, hidden, outputs = up.in_features, down.in_features, down.out_features
    if up.out_features != 2 * hidden:
        raise ValueError(f"{up} and {down} do not fit each other")
    norm, eps = norm_fields(of.norm, inputs)
    after, after_eps = norm_fields(of.post_norm, outputs)
    arguments = abi.MLP.pack(
        norm, up.storage.data_ptr(), optional_pointer(of.up_bias, "the bias of up", (2 * hidden,)),
        down.storage.data_ptr(), optional_pointer(of.down_bias, "the bias of down", (outputs,)), after,
        optional_pointer(of.factors, "the factors of up", (2 * hidden,)),
        inputs, hidden, outputs, WEIGHT_KINDS[up.kind], WEIGHT_KINDS[down.kind], GATES[of.act], of.parallel,
        eps, after_eps, factor(of.scale),
    )  # fmt: skip
    return abi.sublayer(SublayerKind.MLP, arguments).ljust(SUBLAYER_BYTES, b"\0")


def _head_norm(norm: Norm | None, dim: int, heads: int) -> tuple[int, int, float]:
    """Pointer, width and epsilon of a norm of each head or of all heads side by side."""
    if norm is None:
        return 0, 0, 0.0
    width = norm.weight.numel()
    if width not in (dim, heads * dim):
        raise ValueError(f"a norm of {width} features fits neither a head of {dim} nor {heads} of them")
    return float_pointer(norm.weight, "the norm's weight", (width,)), width, norm.eps
