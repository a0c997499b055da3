"""Multi-head latent attention (DeepSeek-V2, 2405.04434): keys and values are projections of one small stored latent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Temperature, gated
from lmstate.models.layers.pooled_index import PooledPositionIndex
from lmstate.models.layers.position_index import EarlierChoice, PositionIndex
from lmstate.models.layers.rope import Rope
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.dense.per_head import per_head_matmul
from lmstate.state import (
    EvictingLatentState,
    LatentState,
    LayerState,
    Layout,
    PooledIndexState,
    Step,
    indexed_latent_state,
    keeping_all,
    latent_state,
    pooled_latent_state,
)

EXPANDED = 1 << 25
"""Numbers of expanded keys and values that exist at a time."""


@dataclass(eq=False)
class MultiHeadLatentAttention:
    """Attention of H heads whose keys are `[key_up[h] @ c ; r]` and values `c @ value_up[h]`, of a stored c and r.

    Few new tokens attend to the latents: `key_up` goes into the query and `value_up` into the output, and nothing is
    expanded. Many new tokens cost less with keys and values expanded for the length of the call; which is cheaper is
    counted, see `_expands`. `rope` None: the layer knows no positions, and r is a key like others. `gates`: that
    many last rows of `down` give a number a head, or a value, whose sigmoid multiplies what a head has seen (Ling 3.0).
    `value_gate`: `q_up` reads the query's latent twice, normed and as it is, and after each head's query it gives the
    gates of what the head has seen (A.X-K2). `index`: it chooses the positions that are attended to, or an earlier
    layer has (DeepSeek V3.2).
    """

    down: Weight  # [Q + Lat + Dr + gates, E]: query (or its latent), latent, rope key, gates
    key_up: Tensor  # [H, Dn, Lat] in the dtype of large products
    value_up: Tensor  # [H, Lat, Dv]
    out: Weight  # [E, H * Dv]
    latent_norm: Norm
    rope_dim: int
    scale: float
    rope: Rope | None = None
    q_norm: Norm | None = None
    q_up: Weight | None = None  # [H * (Dn + Dr), Q], or [H * (Dn + Dr + Dv), 2 * Q]; None: `down` gives the query
    down_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gates: int = 0
    value_gate: bool = False
    sinks: Tensor | None = None  # float32 [H]: see `ops.AttentionParams`
    window: int | None = None
    rope_key_norm: Norm | None = None
    temperature: Temperature | None = None
    index: PositionIndex | PooledPositionIndex | EarlierChoice | None = None

    @property
    def kind(self) -> str:
        if self.index is not None:
            return "indexed latent"
        return "latent" if self.window is None else "latent window"

    @property
    def latent_dim(self) -> int:
        return self.key_up.shape[2]

    def new_state(self, layout: Layout) -> LayerState:
        rotate_by = self.rope.rotate_by if self.rope is not None else None
        if self.index is not None:
            layout = keeping_all(layout)
        if isinstance(self.index, PooledPositionIndex):
            return pooled_latent_state(layout, self.latent_dim, self.rope_dim, self.index.pooling)
        if isinstance(self.index, PositionIndex):
            sizes = self.latent_dim, self.rope_dim, self.index.dim
            rotate_index_by = self.index.rope.rotate_by
            return indexed_latent_state(layout, *sizes, rotate_by=rotate_by, rotate_index_by=rotate_index_by)
        return latent_state(
            layout, self.latent_dim, self.rope_dim, rotate_by=rotate_by, window=self.window, heads=len(self.key_up),
            scale=self.scale,
        )  # fmt: skip

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        heads, nope, latent_dim = self.key_up.shape
        projected = ops.linear(x, self.down, self.down_bias, norm=norm)
        query_width = projected.shape[-1] - latent_dim - self.rope_dim - self.gates
        q, latent, rope_key, gate = projected.split([query_width, latent_dim, self.rope_dim, self.gates], dim=-1)
        raw = q
        if self.q_norm is not None:
            q = ops.norm(q, self.q_norm)
        chosen = None
        if isinstance(self.index, PooledPositionIndex):
            assert isinstance(cache, PooledIndexState)
            chosen, cache = self.index.choose(x, q, step, cache, norm), cache.keys
        elif self.index is not None:
            chosen = self.index.choose(x, q, step, cache, norm)
        assert isinstance(cache, LatentState | EvictingLatentState)
        if self.q_up is not None:
            q = ops.linear(torch.cat([q, raw], dim=-1) if self.value_gate else q, self.q_up)
        q = q.unflatten(-1, (heads, -1))  # [R, T, H, Dn + Dr]
        if self.value_gate:
            q, gates_of_values = q.split([nope + self.rope_dim, self.value_up.shape[2]], dim=-1)
            gate = gates_of_values.flatten(-2)
        if self.temperature is not None:
            q = q * self.temperature.at(step)  # a number a token, which no rotation touches
        q_nope, q_rope = q.split([nope, self.rope_dim], dim=-1)  # [R, T, H, Dn], [R, T, H, Dr]
        if self.rope_key_norm is not None:
            rope_key = ops.norm(rope_key, self.rope_key_norm)
        if self.rope is not None:
            cos, sin, _ = self.rope.rotation(step)
            q_rope = ops.rope(q_rope, cos, sin, self.rope.interleaved)
            rope_key = ops.rope(rope_key[:, :, None], cos, sin, self.rope.interleaved)[:, :, 0]
        cache.store(ops.norm(latent, self.latent_norm), rope_key, step)
        whole = chosen is None and self.window is None and not cache.observed
        if whole and self._expands(step.width, cache.extent(step)):
            seen = self._expanded(q_nope, q_rope, cache, step)  # [R, T, H * Dv]
        else:
            seen = self._absorbed(q_nope, q_rope, cache, step, chosen)
        if self.gates or self.value_gate:
            seen = gated(seen.unflatten(-1, (heads, -1)), gate).flatten(-2)
        return ops.linear(seen, self.out, self.out_bias, residual=residual)

    def _absorbed(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        cache: LatentState | EvictingLatentState,
        step: Step,
        chosen: Tensor | None,
    ) -> Tensor:
        """Attention over the latents as they are stored, or those of chosen positions -> `[R, T, H * Dv]`."""
        q_latent = per_head_matmul(q_nope, self.key_up)  # [R, T, H, Lat]
        if chosen is None:
            seen = cache.attend_latents(q_latent, q_rope, step, scale=self.scale, sinks=self.sinks)
        else:
            assert isinstance(cache, LatentState)
            seen = cache.attend_chosen(q_latent, q_rope, chosen, step, scale=self.scale, sinks=self.sinks)
        return per_head_matmul(seen, self.value_up).flatten(-2)

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, cache: LatentState | EvictingLatentState, step: Step) -> Tensor:
        """Attention over keys `[R, H, S, Dn + Dr]` and values, expanded some heads at a time -> `[R, T, H * Dv]`."""
        latent, rope_key = (part.to(self.key_up.dtype)[:, None] for part in cache.latents(step))  # [R, 1, S, ...]
        query = torch.cat([q_nope, q_rope], dim=-1)
        per_head = latent[..., 0].numel() * (query.shape[-1] + self.value_up.shape[2])
        size = max(1, EXPANDED // max(per_head, 1))
        seen = []
        for first in range(0, query.shape[2], size):
            some = slice(first, first + size)
            nope = latent @ self.key_up[some].mT  # [R, h, S, Dn]
            keys = torch.cat([nope, rope_key.expand(-1, nope.shape[1], -1, -1)], dim=-1)
            values = latent @ self.value_up[some]  # [R, h, S, Dv]
            params = ops.AttentionParams(self.scale, sinks=None if self.sinks is None else self.sinks[some])
            seen.append(ops.attend(query[:, :, some], keys, values, cache.starts(step), step.counts_t, params))
        return torch.cat(seen, dim=2).flatten(-2)

    def _expands(self, width: int, end: int) -> bool:
        """Whether expanding takes fewer multiplications: of every stored token once, but fewer a query and token.

        Never where a native body runs: what a token gives must not depend on how many come with it.
        """
        if ops.dispatch.native(self.key_up) is not None or ops.dispatch.gpu(self.key_up):
            return False
        _, nope, latent = self.key_up.shape
        value = self.value_up.shape[2]
        projections = latent * (nope + value)
        absorbed = width * (end * (2 * latent + self.rope_dim) + projections)
        expanded = end * (width * (nope + self.rope_dim + value) + projections)
        return expanded < absorbed
