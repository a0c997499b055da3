"""Attention for `model.set_attn_implementation("lmstate")`: the native body where it applies and is faster, else sdpa.

Transformers describes what a query may see by a mask. It is looked at once per forward (all layers of a kind share it):
if every row sees its last keys, as causal and sliding layers do, the body needs only their number, which travels with
the mask. A left-padded batch, a bidirectional prefix, a position bias: all else is sdpa's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from lmstate import ops
from lmstate.ops import dispatch

NAME = "lmstate"
BIASED = frozenset({"deepseek_v4"})
"""Models that append a bias of floats to their mask, which turns a boolean one around."""
MAX_TOKENS = 32  # of a row, up to which the native body is the faster one where it has no products of bfloat16


def register() -> None:
    """Make the implementation known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@dataclass(frozen=True)
class CausalWindow:
    """Keys that T queries at the end of S keys see: those from `first` on to their own, the last `window` of them."""

    first: int
    window: int | None


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of sdpa (it takes what that takes), with a `CausalWindow` where it is one; None for a single query
    that sees everything. Of floats for a model that appends a bias."""
    if kwargs["config"].model_type in BIASED:
        return eager_mask(*args, **kwargs)
    seen = sdpa_mask(*args, **kwargs)
    if seen is None or not seen.is_cpu or torch.compiler.is_compiling():
        return seen
    visible = causal_window(seen)
    if visible == CausalWindow(0, None) and seen.shape[2] == 1 and kwargs.get("allow_is_causal_skip", True):
        return None
    if visible is not None:
        seen.lmstate_window = visible  # type: ignore[attr-defined]
    return seen


def causal_window(seen: Tensor) -> CausalWindow | None:
    """Causal window of a boolean mask `[R, 1, T, S]` of queries at the end of the keys, if it has one for all rows."""
    if seen.dtype != torch.bool or seen.ndim != 4 or seen.shape[1] != 1:
        return None
    tokens, stored = seen.shape[2:]
    row = seen[0, 0]  # [T, S]
    if tokens == 0 or tokens > stored or (seen.shape[0] > 1 and not bool((seen[:, 0] == row).all())):
        return None
    own = torch.arange(stored - tokens, stored)  # [T]: the last key that each query sees
    lows = own - row.sum(-1) + 1  # [T]: the first, if there is no gap
    keys = torch.arange(stored)
    if not bool((row == (keys >= lows[:, None]) & (keys <= own[:, None])).all()):
        return None
    low, high = int(lows[0]), int(lows[-1])
    if low == high:
        return CausalWindow(low, None)
    if bool((lows == (own - (own[-1] - high)).clamp(min=low)).all()):
        return CausalWindow(low, int(own[-1]) - high + 1)
    return None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query `[R, H, T, D]`, key `[R, K, S, D]`, value `[R, K, S, Dv]` -> `[R, T, H, Dv]`, as transformers wants it.

    `kwargs`: whatever a model tells its attention (`s_aux`: the sinks of GPT-OSS; `indices`: the keys `[R, T, k]` that
    an indexer chose, of those that the mask lets it see); passed on to sdpa where that runs.
    """
    if kwargs.get("indices") is not None and attention_mask is not None:
        attention_mask = _of_chosen(attention_mask, kwargs["indices"])
    tokens, stored = query.shape[2], key.shape[2]
    sinks = kwargs.get("s_aux")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    visible = None
    if attention_mask is not None:
        visible = getattr(attention_mask, "lmstate_window", None)
    elif tokens == 1 or (causal and tokens == stored):
        visible = CausalWindow(0, None)
    library = dispatch.native(query, key, value, sinks)
    native = (
        visible is not None
        and library is not None
        and (tokens <= MAX_TOKENS or (library.dense.rounds_to_bf16 and key.dtype == torch.bfloat16))
        and dropout == 0.0
        and position_bias is None
        and kwargs.get("cache") is None
        and not dispatch.is_intercepted()
    )
    if native and visible is not None:
        q = query.transpose(1, 2).float()  # [R, T, H, D]
        k, v = (key[:, :, visible.first :], value[:, :, visible.first :]) if visible.first else (key, value)
        starts, counts = _places(query.shape[0], stored - visible.first - tokens, tokens)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        sinks = None if sinks is None else sinks.detach().float().reshape(-1)
        y = ops.attend(
            q, k, v, starts, counts, ops.AttentionParams(scale, softcap, sinks), ops.CausalMask(visible.window)
        )
        return y.to(query.dtype), None
    if softcap is not None or sinks is not None:
        return _scored(module, query, key, value, attention_mask, dropout, scaling, causal, softcap, sinks), None
    return sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        position_bias=position_bias,
        **kwargs,
    )


def _of_chosen(attention_mask: Tensor, indices: Tensor) -> Tensor:
    """The part of a boolean mask `[R, 1, T, S]` that lets queries see keys which were chosen for them."""
    return attention_mask & torch.zeros_like(attention_mask).scatter(-1, indices.long()[:, None], True)


@lru_cache(maxsize=8)
def _places(rows: int, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Starts and counts of the rows, int64 `[R]`: the same in all layers of a step."""
    return torch.full((rows,), start, device="cpu"), torch.full((rows,), count, device="cpu")


def _scored(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a softcap or sinks, which sdpa has not, under any mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)  # [R, H, T, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    tokens, stored = scores.shape[2:]
    if attention_mask is None and causal and tokens > 1:
        attention_mask = torch.ones(tokens, stored, dtype=torch.bool, device=scores.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column.to(scores)], dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]
    else:
        weights = scores.softmax(-1, dtype=torch.float32)
    weights = nn.functional.dropout(weights, dropout, module.training).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous()  # [R, T, H, Dv]
