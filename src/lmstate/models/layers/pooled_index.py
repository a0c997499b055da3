"""Attention to blocks of positions that an index chooses by one key for each block (Qwen4-Exp, GLM-5.3)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.compressed_attention import Compressor
from lmstate.models.layers.position_index import ChoiceKey
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


@dataclass(eq=False)
class PooledPositionIndex:
    """Scores blocks of positions by Hi small queries and one key each, which a compressor makes of those of its tokens.

    Positions of the chosen blocks are attended to, and the last tokens, which fill no block yet (GLM-5.3). No gradient
    goes through a choice.
    """

    key: Weight  # [2 * Di, E]: the key of a token, and its logits for the compressor
    key_norm: Norm
    compressor: Compressor
    query: Weight  # [Hi * Di, Q], of the normed latent of the query
    weights: Weight  # [Hi, E]: what the scores of each head count
    blocks: int
    name: ChoiceKey = field(default_factory=ChoiceKey)

    @property
    def pooling(self) -> Pooling:
        width = self.compressor.width
        return Pooling(self.compressor.rate, 2 * width, index_width=width)

    @property
    def budget(self) -> int:
        """The longest text that is attended to whole."""
        return (self.blocks + 1) * self.compressor.rate - 1

    @torch.no_grad()
    def choose(
        self, x: Tensor, q_latent: Tensor, step: Step, cache: PooledIndexState, norm: Norm | None
    ) -> Tensor | None:
        """Store the index of the new tokens, and choose for them: positions `[R, T, k]`, or None for all."""
        key, logits = ops.linear(x, self.key, norm=norm).chunk(2, dim=-1)
        cache.raw.store(torch.cat([ops.norm(key, self.key_norm), logits], dim=-1), step)
        if (found := cache.inputs(step)) is not None:
            raw, places = found
            keys, gates = raw.chunk(2, dim=-1)
            cache.store_entries(step, index=self.compressor(keys, gates, places))
        if max(step.ends, default=0) <= self.budget:
            return None

        def make() -> Tensor:
            heads, dim = self.weights.shape[0], self.compressor.width
            q = ops.linear(q_latent, self.query).unflatten(-1, (heads, dim))  # [R, T, Hi, Di]
            weights = ops.linear(x, self.weights, norm=norm) * (heads * dim) ** -0.5  # [R, T, Hi]
            return cache.positions(cache.with_rest(cache.choose(q, weights, self.blocks, step), step), step)

        return step.cached(self.name, make)
