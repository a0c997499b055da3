"""Attention to blocks of positions that an index chooses (MiniMax-M3)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import Rope
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import BlockChoice, IndexedAttentionState, LayerState, Layout, Step, indexed_attention_state


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """Scores every stored position by J small queries and one key; a block of positions is as good as its best one.

    As many blocks as `choice` says are attended to by the J groups of heads, each by its own choice. No gradient goes
    through a choice.
    """

    query: Weight  # [J * Di, E]
    key: Weight  # [Di, E]
    query_norm: Norm
    key_norm: Norm
    rope: Rope  # of the first features
    choice: BlockChoice

    @property
    def dim(self) -> int:
        return self.key.shape[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockAttention(Attention):
    """Attention to what an index chooses. A text of no more blocks than are chosen is attended to whole."""

    index: BlockIndex

    @property
    def kind(self) -> str:
        return "indexed attention"

    def new_state(self, layout: Layout) -> LayerState:
        rotate_by = self.rope.rotate_by if self.rope is not None else None
        return indexed_attention_state(
            layout, self.kv_heads, self.head_dim, self.index.dim, self.index.choice, rotate_by=rotate_by,
            rotate_index_by=self.index.rope.rotate_by,
        )  # fmt: skip

    def sublayers(self, norm: Norm | None, post_norm: Norm | None, scale: float) -> tuple[ops.Sublayer, ...]:
        return ()

    def forward(self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        assert isinstance(cache, IndexedAttentionState)
        index, choice = self.index, self.index.choice
        tables = index.rope.rotation(step)
        key = ops.norm(ops.linear(x, index.key, norm=norm), index.key_norm)
        cache.store_index(ops.rope(key[:, :, None], *tables)[:, :, 0], step)
        if max(step.ends, default=0) > choice.budget * choice.size:
            q = ops.linear(x, index.query, norm=norm).unflatten(-1, (-1, index.dim))  # [R, T, J, Di]
            cache.choose_blocks(ops.rope(ops.norm(q, index.query_norm), *tables), step)
        return super().forward(x, step, cache, norm, residual)
