"""The states of attention to blocks of positions that an index chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops.attention.attend_blocks import attend_blocks, choose_blocks
from lmstate.state.layers.attention import AttentionState
from lmstate.state.layers.base import Layout
from lmstate.state.layers.latent import IndexKeys, Shift
from lmstate.state.step import Step


class BlockChoice(NamedTuple):
    """Way in which blocks of positions are chosen."""

    budget: int  # the most blocks of a query
    size: int  # positions of a block
    local: int  # blocks up to the query's own that are always chosen


class ChosenBlocksState(AttentionState):
    """Keys and values of which a step may attend to chosen blocks of `size` positions alone."""

    def __init__(self, layout: Layout, kv_heads: int, head_dim: int, size: int, *, rotate_by: Shift | None):
        self.size = size
        super().__init__(layout, kv_heads, head_dim, rotate_by=rotate_by)

    def view(self, step: Step) -> ops.KVView | None:
        return None  # native bodies of whole layers attend to all positions

    def attend_to(self, make: Callable[[], Tensor], step: Step) -> None:
        """Have the step attend to blocks int64 `[R, T, J, k]`, see `choose_blocks`."""
        step.cached((self, "blocks"), make)

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        params: ops.AttentionParams,
        rotation: ops.RopeTables | None = None,
    ) -> Tensor:
        chosen: Tensor | None = step.cached((self, "blocks"), lambda: None)
        if chosen is None or new is None:
            return super().attend(q, new, step, params, rotation)
        keys, values = new
        if rotation is not None:
            q, keys = ops.rope(q, *rotation), ops.rope(keys, *rotation)
        return self.attend_chosen(q, (keys, values), chosen, step, params)

    def attend_chosen(
        self, q: Tensor, new: tuple[Tensor, Tensor], chosen: Tensor, step: Step, params: ops.AttentionParams
    ) -> Tensor:
        """Store new keys and values `[R, T, K, D]`, and attend to chosen blocks `[R, T, J, k]`."""
        k, v, spans = self.stored("k"), self.stored("v"), (step.starts_t, step.counts_t)
        ops.append(*new, k, v, *spans)
        return attend_blocks(q, k, v, chosen, *spans, params, size=self.size)


class IndexedAttentionState(IndexKeys, ChosenBlocksState):
    """Keys, values, and beside them a small key of each position."""

    kind = "indexed attention"
    what = "keys, values and index keys"

    def __init__(
        self,
        layout: Layout,
        kv_heads: int,
        head_dim: int,
        index_dim: int,
        choice: BlockChoice,
        *,
        rotate_by: Shift | None,
        rotate_index_by: Shift,
    ):
        """The arguments are those of `AttentionState`; `rotate_index_by`: of index keys `[K, S, Di]`."""
        self.index_dim, self.choice, self.rotate_index_by = index_dim, choice, rotate_index_by
        super().__init__(layout, kv_heads, head_dim, choice.size, rotate_by=rotate_by)
        self.kind = "indexed attention"

    def stored_as(
        self, kv_heads: int, dims: dict[str, int]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
        widths, dtypes = super().stored_as(kv_heads, dims)
        return {**widths, "index": (self.index_dim,)}, dtypes

    def choose_blocks(self, q: Tensor, step: Step) -> None:
        """Have the step attend to the best blocks for queries `[R, T, J, Di]`; the keys of its tokens are stored."""
        self.attend_to(lambda: self._chosen(q, step), step)

    def _chosen(self, q: Tensor, step: Step) -> Tensor:
        budget, size, local = self.choice
        return choose_blocks(
            q, self.stored("index"), step.starts_t, step.counts_t, budget=budget, size=size, local=local
        )  # fmt: skip
