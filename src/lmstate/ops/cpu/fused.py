"""The call that runs sublayers as one body."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lmstate.ops.cpu import abi, fused_moe, fused_recurrent
from lmstate.ops.cpu.abi import GATES, KINDS, MAX_HEAD_DIM, SUBLAYER_BYTES, SublayerKind, product_kind
from lmstate.ops.cpu.arguments import (
    check_attended,
    check_quantized_kv,
    factor,
    float_pointer,
    function,
    integers,
    norm_fields,
    optional_pointer,
    pack_codes,
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


class FusedBodies:
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
        return abi.STARTS.pack(starts=0 if starts is None else integers(starts, "starts", rows).data_ptr())

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
        k: Stored | None = view.k
        v: Stored | None = view.v
        codes = b""
        if quantized is not None:
            check_quantized_kv(quantized, (rows, kv_heads), dim, dim)
            k, v, codes = quantized.tail, None, pack_codes(quantized)
        planes = 0 if columns is None else columns.shape[2]
        queries = 0 if view.queries is None else float_pointer(view.queries, "queries", tuple(view.queries.shape))
        k_row, k_head, k_slot = (0, 0, 0) if k is None else k.stride()[:3]
        v_row, v_head, v_slot = (0, 0, 0) if v is None else v.stride()[:3]
        (k_table, v_table), (table_row, block) = table_pointers(k, v), table_shape(k)
        return abi.KV_VIEW.pack(
            k=0 if k is None else k.data_ptr(), v=0 if v is None else v.data_ptr(),
            columns=optional_pointer(columns, "columns", (rows, kv_heads, planes, slots)), queries=queries,
            k_table=k_table, v_table=v_table, slots=slots, k_row=k_row, k_head=k_head, k_slot=k_slot, v_row=v_row,
            v_head=v_head, v_slot=v_slot, table_row=table_row, block=block, planes=planes,
            kind=0 if k is None else KINDS[k.dtype], window=window or 0, chunk=chunk or 0, codes=codes,
        )  # fmt: skip

    def rotation(self, rotation: RopeTables | None, rows: int, tokens: int) -> bytes:
        """The end of the arguments of attention."""
        if rotation is None:
            return bytes(abi.ROTATION.size)
        *outer, half = rotation.cos.shape
        by_position = len(outer) == 1
        shape = (*outer, half) if by_position else (rows, tokens, half)
        cos, sin = (float_pointer(table, "cos and sin", shape) for table in rotation[:2])
        return abi.ROTATION.pack(
            cos=cos, sin=sin, half=half, interleaved=rotation.interleaved, positions=outer[0] if by_position else 0
        )

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
            x=stream.data_ptr(), residual=added, y=y.data_ptr(), starts=0 if starts is None else starts.data_ptr(),
            counts=0 if counts is None else counts.data_ptr(), keep=0 if keep_t is None else keep_t.data_ptr(),
            rows=rows, tokens=tokens, count=len(sublayers), threads=torch.get_num_threads(), kept=kept,
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
    (norm, norm_eps), (after, after_eps) = norm_fields(of.norm, inputs), norm_fields(of.post_norm, outputs)
    arguments = abi.ATTENTION_WEIGHTS.pack(
        norm=norm, qkv=qkv.storage.data_ptr(), qkv_bias=optional_pointer(of.qkv_bias, "the bias of qkv", (width,)),
        q_norm=q_norm, k_norm=k_norm, v_norm=v_norm, sinks=optional_pointer(of.params.sinks, "sinks", (heads,)),
        out=out.storage.data_ptr(), out_bias=optional_pointer(of.out_bias, "the bias of out", (outputs,)),
        after=after, inputs=inputs, outputs=outputs, heads=heads, kv_heads=kv_heads, dim=dim, gated=of.gate,
        q_norm_width=q_width, k_norm_width=k_width, qkv_kind=product_kind(qkv), out_kind=product_kind(out),
        reads=of.shared_kv, gates=of.gates, norm_eps=norm_eps, q_eps=q_eps, k_eps=k_eps, v_eps=v_eps,
        scale=of.params.scale, softcap=of.params.softcap or 0.0, after_eps=after_eps, residual_scale=factor(of.scale),
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
        norm=norm, up=up.storage.data_ptr(), up_bias=optional_pointer(of.up_bias, "the bias of up", (2 * hidden,)),
        down=down.storage.data_ptr(), down_bias=optional_pointer(of.down_bias, "the bias of down", (outputs,)),
        after=after, factors=optional_pointer(of.factors, "the factors of up", (2 * hidden,)),
        inputs=inputs, hidden=hidden, outputs=outputs, up_kind=product_kind(up),
        down_kind=product_kind(down), gate=GATES[of.act], parallel=of.parallel, eps=eps, after_eps=after_eps,
        residual_scale=factor(of.scale),
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
