"""Slots that future queries are expected to attend to (Expected Attention; Devoto et al. 2025, 2510.00636)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate.state.kv.policies.base import Budget, Slots

OFFSETS = 16  # of future positions that are averaged over


@dataclass(frozen=True)
class ExpectedAttention(Budget):
    """Keeps the slots that queries like the last `window` ones will attend to from the next `future` positions.

    The last queries, turned back from their positions and on to the average of future ones, are taken for normal with
    mean m and covariance C. A slot's weight is then exp(m k + k C k / 2), normalized over the slots, averaged over the
    query heads of a group, times the length of its value. Asked again whenever the budget is passed, `batch` slots at a
    time: between two evictions a head holds `budget - batch` or more.
    """

    budget: int = 2048
    recent: int = 16
    window: int = 64
    future: int = 512

    @property
    def batch(self) -> int:
        room = self.budget - self.sinks - self.recent
        return max(min(self.window, room) // 2, min(self.budget // 4, room))

    @property
    def asks(self) -> int:
        return self.window

    def rank(self, slots: Slots) -> Tensor:
        weights = torch.stack([self._expected(slots, row) for row in range(len(slots.positions))])
        return weights * slots.values.norm(dim=-1)

    def _expected(self, slots: Slots, row: int) -> Tensor:
        """float32 `[K, S]`"""
        there = slots.asked[row]
        if not there.any():
            return torch.zeros_like(slots.positions[row], dtype=torch.float32)
        now = _turned_to_the_end(slots.queries[row].transpose(0, 1), slots.turn)[:, there]  # [H, w, D]
        steps = torch.linspace(0, self.future, OFFSETS, dtype=torch.float32).round().int().tolist()
        basis = torch.eye(now.shape[2], dtype=torch.float32, device=now.device)[None]
        ahead = now @ torch.stack([slots.turn(basis, step) for step in steps]).mean(0)  # turning is linear
        mean = ahead.mean(1, keepdim=True)  # [H, 1, D]
        spread = (ahead - mean) * slots.scale / ahead.shape[1] ** 0.5
        keys = slots.keys[row]  # [K, S, D]
        means, spreads = (x.unflatten(0, (len(keys), -1)) for x in (mean, spread))  # [K, G, 1, D], [K, G, w, D]
        along = (keys @ spreads.flatten(1, 2).mT).unflatten(-1, spreads.shape[1:3]).norm(dim=-1)  # [K, S, G]
        logits = keys @ means.flatten(1, 2).mT * slots.scale + 0.5 * along.square()
        return logits.masked_fill(~slots.alive[row][..., None], -torch.inf).softmax(1).nan_to_num(0).mean(-1)


def _turned_to_the_end(queries: Tensor, turn: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The queries `[H, W, D]` of the last W positions as if they all stood at the position that comes next."""
    deltas = torch.arange(queries.shape[1], 0, -1, device=queries.device)[:, None]
    for bit in range(queries.shape[1].bit_length()):  # a turn for each binary digit of the distances
        queries = torch.where((deltas >> bit & 1).bool(), turn(queries, 1 << bit), queries)
    return queries
