"""Attention to blocks of positions that an index chooses by one key for each block (Qwen4-Exp)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import Rope
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import (
    ChosenBlocksState,
    LayerState,
    Layout,
    PooledIndexState,
    Pooling,
    Step,
    pooled_index_state,
)


@dataclass(frozen=True, eq=False)
class PooledIndex:
    """Scores each block of `rate` positions by Hi small queries and one key, the mean of those of its tokens.

    As many blocks as the budget says are attended to, and the last tokens, which fill no block yet. A key is normed and
    rotated by the place of its first token. No gradient goes through a choice.
    """

    projection: Weight  # [(Hi + 1) * Di, E]: the queries, then the key
    query_norm: Norm
    key_norm: Norm
    rope: Rope  # of the first features
    rate: int
    budget: int  # blocks

    @property
    def dim(self) -> int:
        return self.query_norm.weight.shape[0]

    @torch.no_grad()
    def choose(self, x: Tensor, step: Step, cache: PooledIndexState, norm: Norm | None) -> Tensor | None:
        """Store the keys of the new tokens, and choose for them: blocks `[R, T, k]`, or None for all."""
        projected = ops.linear(x, self.projection, norm=norm).unflatten(-1, (-1, self.dim))  # [R, T, Hi + 1, Di]
        cache.raw.store(projected[:, :, -1], step)
        if (found := cache.inputs(step)) is not None:
            cache.store_entries(step, index=self._keys(*found))
        if max(step.ends, default=0) // self.rate <= self.budget:
            return None
        q = ops.rope(ops.norm(projected[:, :, :-1], self.query_norm), *self.rope.rotation(step))
        return cache.with_rest(cache.choose(q, q.new_ones(q.shape[:3]), self.budget, step), step)

    def _keys(self, raw: Tensor, places: Tensor) -> Tensor:
        """Raw keys `[R, W, rate, Di]` of tokens at places `[R, W, rate]` -> `[R, W, Di]`."""
        total, *others = raw.unbind(2)
        for other in others:  # one after the other: a sum over them would go as it likes
            total = total + other
        key = ops.norm(total / self.rate, self.key_norm)
        return ops.rope(key[:, :, None], *self.rope.tables(places[..., 0].clamp(min=0)))[:, :, 0]


@dataclass(frozen=True, eq=False, kw_only=True)
class PooledIndexAttention(Attention):
    """Attention to what an index chooses. A text of no more blocks than are chosen is attended to whole."""

    index: PooledIndex

    @property
    def kind(self) -> str:
        return "pooled index"

    def new_state(self, layout: Layout) -> LayerState:
        rotate_by = self.rope.rotate_by if self.rope is not None else None
        pooling = Pooling(self.index.rate, self.index.dim, index_width=self.index.dim)
        return pooled_index_state(layout, self.kv_heads, self.head_dim, pooling, rotate_by=rotate_by)

    def sublayers(self, norm: Norm | None, post_norm: Norm | None, scale: float) -> tuple[ops.Sublayer, ...]:
        return ()

    def forward(self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        assert isinstance(cache, PooledIndexState) and isinstance(cache.keys, ChosenBlocksState)
        chosen = self.index.choose(x, step, cache, norm)
        if chosen is not None:
            each = chosen[:, :, None].expand(-1, -1, self.kv_heads, -1)  # all heads go by one choice
            cache.keys.attend_to(lambda: each, step)
        return super().forward(x, step, cache.keys, norm, residual)
