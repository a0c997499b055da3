"""Mixers side by side in one layer: attention and a state space."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.base import FusableLayer
from lmstate.models.layers.mamba2 import Mamba2
from lmstate.models.layers.rope import Rope
from lmstate.ops import Norm, Residual
from lmstate.state import CompositeState, LayerState, Layout, Step


@dataclass(frozen=True, eq=False)
class ParallelHybrid(FusableLayer):
    """Attention and a state space that read the same input; what they give is scaled and added."""

    attention: Attention
    other: Mamba2
    attention_scale: float = 1.0
    other_scale: float = 1.0

    @property
    def kind(self) -> str:
        return "composite"

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

    def new_state(self, layout: Layout) -> LayerState:
        return CompositeState([self.attention.new_state(layout), self.other.new_state(layout)])

    def rope_tables(self, step: Step) -> ops.RopeTables | None:
        return self.attention.rope_tables(step)

    def sublayers(self, norm: Norm | None, post_norm: Norm | None, scale: float) -> tuple[ops.Sublayer, ...]:
        first = self.attention.sublayers(norm, None, scale * self.attention_scale)
        second = self.other.sublayers(norm, None, scale * self.other_scale, parallel=True)
        if not first or not second or post_norm is not None:  # that norm is of the sum, which no sublayer has
            return ()
        return *first, *second

    def forward(self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        assert isinstance(cache, CompositeState)
        of_attention, of_other = cache.members
        alone = residual is None or residual.norm is not None
        stream, scale = (torch.zeros_like(x), 1.0) if alone or residual is None else (residual.stream, residual.scale)
        y = self.attention(x, step, of_attention, norm, Residual(stream, scale=scale * self.attention_scale))
        y = self.other(x, step, of_other, norm, Residual(y, scale=scale * self.other_scale))
        return ops.add_residual(residual, y) if residual is not None and alone else y
