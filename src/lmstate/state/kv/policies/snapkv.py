"""Slots that the last queries attend to (SnapKV; Li et al. 2024, 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.state.kv.policies.base import Budget, Slots


@dataclass(frozen=True)
class SnapKV(Budget):
    """Keeps the slots that the last `window` queries attend to, and those `window` tokens themselves.

    Scores are sums over the queries of their attention to what is kept, the largest of `pool` neighbors in the text,
    averaged over the query heads of a group. The paper scores a prompt once. Here the same rule is applied again
    whenever the budget is passed, for a quarter of it at a time (or `window` slots, where that is more). Between two
    evictions a head holds the rest of the budget or more.
    """

    budget: int = 2048
    window: int = 32
    pool: int = 7

    @property
    def newest(self) -> int:
        return max(self.recent, self.window)

    @property
    def batch(self) -> int:
        return max(self.window, self.budget // 4)

    @property
    def asks(self) -> int:
        return self.window

    def rank(self, slots: Slots) -> Tensor:
        kv_heads, count = slots.positions.shape[1], slots.queries.shape[1]
        grouped = slots.queries.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [R, K, G, W, D]
        scores = grouped.flatten(2, 3) @ slots.keys.mT * slots.scale  # [R, K, G * W, S]
        own = slots.lengths - count + torch.arange(count, device=scores.device)  # [R, 1, W]
        sees = slots.alive[:, :, None] & (slots.positions[:, :, None] <= own[..., None])  # [R, K, W, S]
        weights = scores.unflatten(2, (-1, count)).masked_fill_(~sees[:, :, None], -torch.inf).softmax(-1).mean(2)
        return neighbors(weights.masked_fill_(~slots.asked[:, None, :, None], 0).sum(2), slots, self.pool)


def neighbors(scores: Tensor, slots: Slots, width: int) -> Tensor:
    """The largest score `[R, K, S]` among the `width` slots around each, in the order of the text."""
    order = torch.where(slots.alive, slots.positions, torch.iinfo(torch.int32).max).argsort(dim=-1)
    sorted_scores = scores.masked_fill(~slots.alive, 0).gather(-1, order)
    pooled = F.max_pool1d(sorted_scores, width, stride=1, padding=width // 2)[..., : scores.shape[-1]]
    return torch.empty_like(scores).scatter_(-1, order, pooled)
