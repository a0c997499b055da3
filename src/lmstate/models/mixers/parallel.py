"""Mixers side by side in one layer: attention and a state space, say."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmstate import ops
from lmstate.models.mixers.attention import Attention
from lmstate.models.mixers.mixer import Mixer
from lmstate.models.rope import Rope
from lmstate.ops import Norm, Residual
from lmstate.state import CompositeState, LayerState, Layout, Step


@dataclass(eq=False)
class Parallel:
    """Attention and another mixer that read the same input; what they give is scaled and added."""

    attention: Attention
    other: Mixer
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

    def __call__(
        self, x: Tensor, step: Step, memory: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(memory, CompositeState)
        of_attention, of_other = memory.members
        x = x if norm is None else ops.norm(x, norm)
        seen = self.attention(x, step, of_attention) * self.attention_scale
        out = seen.add(self.other(x, step, of_other), alpha=self.other_scale)
        return out if residual is None else residual.added(out)
