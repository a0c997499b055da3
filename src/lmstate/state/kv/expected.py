"""What future queries are expected to look at (Expected Attention; Devoto et al. 2025, 2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate.state.kv.policy import Budget, Slots

OFFSETS = 16  # of future positions that are averaged over


@dataclass(frozen=True)
class ExpectedAttention(Budget):
    """Keeps the slots that queries like the last `window` ones will attend to from the next `future` positions.

    The last queries, turned back from their positions and on to the average of future ones, are taken for normal with
    mean m and covariance C; a slot's weight is then exp(m k + k C k / 2), normalised over the slots, averaged over the
    query heads of a group, times the length of its value. Asked again whenever the budget is passed, `batch` slots at a
    time: between two evictions a head holds `budget - batch` or more.
    """

    budget: int = 2048
    recent: int = 16
    window: int = 64
    future: int = 512

    @property
    def batch(self) -> int:
        return min(self.window, self.budget - self.sinks - self.recent) // 2

    @property
    def asks(self) -> int:
        return self.window

    def rank(self, slots: Slots) -> Tensor:
        weights = torch.stack([
            self._expected(slots, row, int(length)) for row, length in enumerate(slots.lengths.flatten().tolist())
        ])  # fmt: skip
        return weights * slots.values.norm(dim=-1)

    def _expected(self, slots: Slots, row: int, length: int) -> Tensor:
        """float32 `[K, S]`"""
        there = slots.asked[row]
        if not there.any():
            return torch.zeros_like(slots.positions[row], dtype=torch.float32)
        first = length - len(there)
        queries = slots.queries[row]  # [W, H, D]
        plain = torch.stack([slots.turn(q[None], -(first + i))[0] for i, q in enumerate(queries) if there[i]], dim=1)
        steps = torch.linspace(0, self.future, OFFSETS).round().int().tolist()
        ahead = torch.stack([slots.turn(plain, length + step) for step in steps]).mean(
            0
        )  # [H, w, D]: turning is linear
        mean = ahead.mean(1, keepdim=True)  # [H, 1, D]
        spread = (ahead - mean) * slots.scale / ahead.shape[1] ** 0.5
        keys = slots.keys[row].repeat_interleave(len(ahead) // len(slots.positions[row]), dim=0)  # [H, S, D]
        logits = (keys @ mean.mT)[..., 0] * slots.scale + 0.5 * (keys @ spread.mT).square().sum(-1)  # [H, S]
        grouped = logits.unflatten(0, (len(slots.positions[row]), -1))  # [K, G, S]
        return grouped.masked_fill(~slots.alive[row][:, None], -torch.inf).softmax(-1).nan_to_num(0).mean(1)
