"""Mixers side by side in one layer: attention and a state space."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.base import JoiningMixer, Sublayers
from lmstate.models.layers.mamba2 import Mamba2
from lmstate.models.layers.rope import Rope
from lmstate.ops import Norm, Residual
from lmstate.state import CompositeState, LayerState, Layout, RecurrentState, Step


@dataclass(frozen=True, eq=False)
class ParallelHybrid(JoiningMixer):
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

    def rotation(self, step: Step) -> ops.RopeTables | None:
        return self.attention.rotation(step)

    def half(self, norm: Norm | None, after: Norm | None, scale: float) -> Sublayers | None:
        first = self.attention.half(norm, None, scale * self.attention_scale)
        if first is None or after is not None:  # a norm is of the sum, which no half has
            return None
        return first, self.other.half(norm, None, scale * self.other_scale, parallel=True)

    def joins(self, run: ops.Run, half: Sublayers, step: Step, memory: LayerState) -> bool:
        assert isinstance(memory, CompositeState) and isinstance(half, tuple)
        (first, second), (of_attention, of_other) = half, memory.members
        assert isinstance(of_other, RecurrentState) and isinstance(second, ops.RecurrentSublayer)
        if not run.native or (carry := of_other.single_scan_carry(step)) is None or run.foldable(second, carry) is None:
            return False  # neither waits, or both
        if not self.attention.joins(run, first, step, of_attention):
            return False
        folded = run.folds(second, carry)
        assert folded is not None
        of_other.record(step, *folded)
        return True

    def apart(self, x: Tensor, step: Step, memory: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        assert isinstance(memory, CompositeState)
        of_attention, of_other = memory.members
        alone = residual is None or residual.norm is not None
        stream, scale = (torch.zeros_like(x), 1.0) if alone or residual is None else (residual.stream, residual.scale)
        y = self.attention(x, step, of_attention, norm, Residual(stream, scale=scale * self.attention_scale))
        y = self.other(x, step, of_other, norm, Residual(y, scale=scale * self.other_scale))
        return ops.add_residual(residual, y) if residual is not None and alone else y
