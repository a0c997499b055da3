"""The index of a layer that attends to chosen positions (DeepSeek Sparse Attention, 2512.02556)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lmstate import ops
from lmstate.models.layers.rope import Rope
from lmstate.ops import Norm, Weight
from lmstate.state import IndexKeys, LatentState, LayerState, Step


class ChoiceKey:
    """Name of a choice in a step, which several layers may use."""


@dataclass(eq=False)
class PositionIndex:
    """Scores every stored position by Hi small queries and one key, and chooses the `budget` positions of the largest.

    No more than `budget` positions are all chosen, and nothing is scored. No gradient goes through a choice.
    """

    key: Weight  # [Di, E]
    key_norm: Norm
    query: Weight  # [Hi * Di, Q], of the normed latent of the query
    weights: Weight  # [Hi, E]: what the scores of each head count
    rope: Rope  # of the first features of queries and keys
    budget: int
    rotates_last: bool = False  # it is of their last features: both are stored and scored with those first
    name: ChoiceKey = field(default_factory=ChoiceKey)

    @property
    def dim(self) -> int:
        return self.key.shape[0]

    def choose(self, x: Tensor, q_latent: Tensor, step: Step, cache: LayerState, norm: Norm | None) -> Tensor | None:
        """Store the index of the new tokens, and choose for them: positions `[R, T, k]`, or None for all."""
        assert isinstance(cache, IndexKeys) and isinstance(cache, LatentState)
        heads = self.weights.shape[0]
        key = ops.norm(ops.linear(x, self.key, norm=norm), self.key_norm)
        cache.store_index(self._rotated(key[:, :, None], step)[:, :, 0], step)
        if cache.extent(step) <= self.budget:
            return None

        def make() -> Tensor:
            q = self._rotated(ops.linear(q_latent, self.query).unflatten(-1, (heads, self.dim)), step)  # [R, T, Hi, Di]
            weights = ops.linear(x, self.weights, norm=norm) * (heads * self.dim) ** -0.5  # [R, T, Hi]
            return cache.choose(q, weights, self.budget, step)

        return step.cached(self.name, make)

    def _rotated(self, x: Tensor, step: Step) -> Tensor:
        cos, sin, interleaved = self.rope.rotation(step)
        return ops.rope(x.roll(2 * cos.shape[-1], -1) if self.rotates_last else x, cos, sin, interleaved)


@dataclass(eq=False)
class EarlierChoice:
    """The choice of an earlier layer (GLM-5.2), by which this one goes too."""

    name: ChoiceKey
    budget: int

    def choose(self, x: Tensor, q_latent: Tensor, step: Step, cache: LayerState, norm: Norm | None) -> Tensor | None:
        """Positions `[R, T, k]`, or None for all: as `PositionIndex.choose`, of which nothing is stored here."""
        assert isinstance(cache, LatentState)
        if cache.extent(step) <= self.budget:
            return None

        def missing() -> Tensor:
            raise AssertionError("an earlier layer of the step chooses first")

        return step.cached(self.name, missing)
