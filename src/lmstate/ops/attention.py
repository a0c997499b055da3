"""A layer of attention as one operation, from the residual stream and back to it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.linear import few_rows
from lmstate.ops.norm import Norm
from lmstate.ops.residual import Residual
from lmstate.ops.rotate_attend import Rotation
from lmstate.ops.scoring import EVERYTHING, Sight
from lmstate.ops.weight import Weight


class Rings(NamedTuple):
    """Keys `[R, K, S, D]` and values `[R, K, S, Dv]` as they are, position p in slot p % S, and what a query sees.

    A layer that has evicted some counts what it kept instead of positions: `starts` int64 `[R]` says how many. It may
    ask for two things to be filled in: `columns` float32 `[R, K, n, S]`, zeros, with the attention that slots receive
    (see `ops.attend_slots.Columns`), and `queries` float32 `[R, T, H, D]` with the queries as they attend.
    """

    k: Tensor
    v: Tensor
    sight: Sight = EVERYTHING
    starts: Tensor | None = None
    columns: Tensor | None = None
    queries: Tensor | None = None


class AttentionParts(Protocol):
    """What a layer of attention is made of; see `models.mixers.attention.Attention`."""

    qkv: Weight
    out: Weight
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    sinks: Tensor | None
    q_norm: Norm | None
    k_norm: Norm | None
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    gate: bool


def fused_attention(
    x: Tensor,
    parts: AttentionParts,
    rotation: Rotation | None,
    rings: Rings,
    starts: Tensor,
    counts: Tensor,
    *,
    norm: Norm | None = None,
    residual: Residual | None = None,
) -> Tensor | None:
    """Norm, project, rotate, store, attend, project back and add: float32 `[R, T, E]`, bit for bit what the separate
    operations give, but for the sigmoid of a gate. None where no one body does it all: a longer step, a gradient to
    follow, another device, an unusual norm.

    x: float32 `[R, T, E]`. starts, counts: int64 `[R]`.
    """
    stream = None if residual is None else residual.stream
    library = dispatch.native(x, rings.k, parts.qkv.storage, parts.out.storage, stream, parts.sinks)
    if library is None or not few_rows(x):
        return None
    if not all(each is None or each.simple for each in (norm, parts.q_norm, parts.k_norm, residual)):
        return None
    if not library.can_fuse(rings.k, rings.v):
        return None
    return library.fused.attention(x, parts, rotation, rings, starts, counts, norm, residual)
