"""Attention of a decoder to an encoded source, and of an encoder to all of its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.relative_bias import RelativeBias
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import CrossState, LayerState, Layout, Step
from lmstate.state.step import integers

WINDOW_QUERIES = 256  # that are computed together where an encoder's attention has a window


@dataclass(frozen=True, eq=False)
class CrossAttention:
    """Attention of H query heads to the K heads of keys and values of a source (Vaswani et al. 2017).

    `kv [2 * K * D, E]` makes them of what the encoder gives, once for a source; `queries [H * D, E]` of each token.
    """

    queries: Weight
    kv: Weight
    out: Weight
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    query_bias: Tensor | None = None
    kv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    softcap: float | None = None

    @property
    def kind(self) -> str:
        return "cross"

    def new_state(self, layout: Layout) -> LayerState:
        return CrossState(layout, self.kv_heads, self.head_dim)

    def keys_values(self, encoded: Tensor) -> dict[str, Tensor]:
        """The encoder's output `[1, S, E]` -> keys and values `[K, S, D]`."""
        k, v = ops.linear(encoded, self.kv, self.kv_bias)[0].unflatten(-1, (2, self.kv_heads, -1)).unbind(1)
        return {"k": k.transpose(0, 1), "v": v.transpose(0, 1)}

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, CrossState)
        q = ops.linear(x, self.queries, self.query_bias, norm=norm).unflatten(-1, (self.heads, -1))
        seen = cache.attend(q, step, ops.AttentionParams(self.scale, self.softcap))
        return ops.linear(seen.flatten(-2), self.out, self.out_bias, residual=residual)

    def weights(self, x: Tensor, cache: LayerState, norm: Norm | None, heads: Sequence[int]) -> Tensor:
        """The attention of each token of one row to each position of its source, by some heads: float32 `[A, T, S]`."""
        assert isinstance(cache, CrossState)
        q = ops.linear(x, self.queries, self.query_bias, norm=norm).unflatten(-1, (self.heads, -1))[0]  # [T, H, D]
        keys = cache.keys(0).repeat_interleave(self.heads // self.kv_heads, dim=0)[list(heads)]  # [A, S, D]
        scores = (q.transpose(0, 1)[list(heads)].to(keys.dtype) @ keys.mT).float() * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores.softmax(-1)


@dataclass(frozen=True, eq=False)
class BidirectionalAttention:
    """The attention of an encoder: each token sees all of the text, which comes as one piece and leaves no state.

    `attention`: its weights; with a window, each token sees the others at most that many positions away. `bias`: of
    the scores, by distance, or None.
    """

    attention: Attention
    bias: RelativeBias | None = None

    @property
    def kind(self) -> str:
        return "bidirectional"

    def new_state(self, layout: Layout) -> LayerState:
        raise AssertionError("an encoder keeps nothing of a text")

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        own = self.attention
        qkv = ops.linear(x, own.qkv, own.qkv_bias, norm=norm).unflatten(-1, (-1, own.head_dim))
        q, k, v = qkv.split([own.heads, own.kv_heads, own.kv_heads], dim=2)  # [1, S, H, D], [1, S, K, D] twice
        if (rotation := own.rotation(step)) is not None:
            q, k = ops.rope(q, *rotation), ops.rope(k, *rotation)
        keys, values = (part.transpose(1, 2).contiguous() for part in (k, v))
        length = integers([x.shape[1]])
        params = ops.AttentionParams(own.scale, own.softcap)
        if own.window is not None and x.shape[1] > own.window + 1:
            seen = _within(q, keys, values, params, own.window)
            return ops.linear(seen.flatten(-2), own.out, own.out_bias, residual=residual)
        bias = self.bias
        biases = None if bias is None else step.cached(bias, lambda: bias.between(step.width))
        seen = ops.attend_whole(q, keys, values, length, length, params, biases)
        return ops.linear(seen.flatten(-2), own.out, own.out_bias, residual=residual)


def _within(q: Tensor, k: Tensor, v: Tensor, params: ops.AttentionParams, window: int) -> Tensor:
    """Attention of q `[1, S, H, D]` to keys and values `[1, K, S, D]` at most `window` positions away -> as q."""
    count, seen = q.shape[1], []
    for start in range(0, count, WINDOW_QUERIES):
        stop = min(start + WINDOW_QUERIES, count)
        first, last = max(start - window, 0), min(stop + window, count)
        at = torch.arange(first, last, device=q.device) - torch.arange(start, stop, device=q.device)[:, None]
        bias = torch.zeros(at.shape, device=q.device).masked_fill(at.abs() > window, -torch.inf)
        keys, values = (part[:, :, first:last].contiguous() for part in (k, v))
        lengths, counts = integers([last - first]), integers([stop - start])
        biases = bias.expand(q.shape[2], -1, -1)
        seen.append(ops.attend_whole(q[:, start:stop].contiguous(), keys, values, lengths, counts, params, biases))
    return torch.cat(seen, dim=1)
