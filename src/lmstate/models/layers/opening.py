"""Learned positions in front of every text: vectors of the stream (prompt tuning, Lester et al. 2021), or keys and
values of every layer (prefix tuning, Li and Liang 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops import RopeTables
from lmstate.state import Media, RowOpening, Step


@dataclass(frozen=True, eq=False)
class LearnedKeys:
    """Keys and values `[P, K, D]` of the first P positions of every row, as attention reads them."""

    keys: Tensor
    values: Tensor

    def applied(
        self, q: Tensor, new: tuple[Tensor, Tensor], rotation: RopeTables | None, step: Step
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Queries `[R, T, H, D]`, keys and values `[R, T, K, D]`, rotated, with these in their places."""
        k, v = new
        if rotation is not None:
            q, k = ops.rope(q, *rotation), ops.rope(k, *rotation)
        count, positions = len(self.keys), step.positions
        learned, places = (positions < count)[..., None, None], positions.clamp(max=count - 1)
        return q, (torch.where(learned, self.keys[places], k), torch.where(learned, self.values[places], v))


@dataclass(frozen=True, eq=False)
class LearnedOpening:
    """The learned positions of a model: `vectors` float32 `[P, E]` of the stream, or `keys_values` float32 `[L, 2, P,
    K, D]` of its L layers. `token`: the id that is at each of them."""

    vectors: Tensor
    keys_values: Tensor | None = None
    token: int = 0

    @staticmethod
    def of_keys_values(keys_values: Tensor, width: int) -> LearnedOpening:
        """An opening of keys and values, for a stream as wide as `width`."""
        return LearnedOpening(torch.zeros(keys_values.shape[2], width, device=keys_values.device), keys_values)

    @cached_property
    def opening(self) -> RowOpening:
        """The positions as a state knows them."""
        if self.keys_values is None:
            return RowOpening(Media.of(self.vectors, self.token))
        learned = self.keys_values.detach().movedim(2, 0).flatten(1)
        return RowOpening(replace(Media.of(learned, self.token), embeddings=self.vectors))

    @property
    def digest(self) -> Tensor:
        """A hash of all of it, uint8 `[32]`."""
        return torch.frombuffer(bytearray.fromhex(self.opening.media.hash), dtype=torch.uint8)

    def keys_in(self, step: Step) -> list[LearnedKeys]:
        """Of each layer, the keys and values that it has in a step; empty where the step has none of the positions."""
        if self.keys_values is None or not any(start < len(self.vectors) for _, start, _ in step.spans):
            return []
        return [LearnedKeys(*layer) for layer in self.keys_values]
