"""Biases of attention scores by the distance of two tokens, in buckets that grow with it (T5, 1910.10683)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """One learned number for each head and bucket of distances: `weight` float32 `[buckets, H]`.

    Half of the buckets hold one distance each, the others grow up to `max_distance`, from which on all are in the last.
    An encoder has one half of them for the keys before a query and one for those after it.
    """

    weight: Tensor
    max_distance: int

    def causal(self) -> Tensor:
        """Of keys that are so far before the query, float32 `[H, max_distance + 1]`; the last holds for all beyond."""
        distances = torch.arange(self.max_distance + 1, device=self.weight.device)
        return self.weight[self._bucket(distances, len(self.weight))].T.contiguous()

    def between(self, count: int) -> Tensor:
        """Of all pairs of `count` tokens, by query and key: float32 `[H, count, count]`."""
        half = len(self.weight) // 2
        at = torch.arange(count, device=self.weight.device)
        offset = at - at[:, None]  # from the query on
        buckets = (offset > 0) * half + self._bucket(offset.abs(), half)
        return self.weight[buckets].permute(2, 0, 1).contiguous()

    def _bucket(self, distance: Tensor, buckets: int) -> Tensor:
        exact = buckets // 2
        # In float32 and in this order: another rounding puts a distance at a border into the other bucket.
        ratio = torch.log(distance.float() / exact) / math.log(self.max_distance / exact)
        far = exact + (ratio * (buckets - exact)).clamp(min=0).long()
        return torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
