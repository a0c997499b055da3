"""Slots in no order that a step fills and evicts: values of `lmstate.ops.attention.slots`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import NamedTuple

from torch import Tensor

NONE = 2**31 - 1


@dataclass(frozen=True, eq=False)
class SlotTable:
    """Slots `[R, K, S]`, the first `filled[r, k]` of them filled, and `[R, K, G]` that were evicted lately.

    `stored` has `position` int32 `[R, K, S]` and any tensors `[R, K, S, width]`. `undo_log` has the same of G slots,
    and int32 `[R, K, G]` each: `evicted_at`, the length at which a slot was evicted (0: none was), and `slot`, where it
    lay. The next one goes to `undo_head[r, k] % G`: read backwards, the log undoes evictions one by one.

    Where attention is summed, `stored` has `scores` float32 `[R, K, n, S]` too: the sums at length L in L % n, of the
    slots as they lay then.
    """

    stored: dict[str, Tensor]
    undo_log: dict[str, Tensor]
    filled: Tensor  # int64 [R, K]
    undo_head: Tensor  # int64 [R, K]

    @cached_property
    def slots(self) -> int:
        """S."""
        return self.stored["position"].shape[2]

    @cached_property
    def undo_slots(self) -> int:
        """G."""
        return self.undo_log["position"].shape[2]


class EvictLowest(NamedTuple):
    """The slots of lowest score, or position, of every head that has more than `budget`; the oldest among equals."""

    budget: int
    batch: int  # as many go at least
    sinks: int  # the positions below do not
    newest: int  # nor do the last ones
    by_scores: bool

    def excess(self, held: int) -> int:
        """Number of slots to evict of a head that holds `held`."""
        return max(held - self.budget, self.batch) if held > self.budget else 0


@dataclass(frozen=True, eq=False)
class SlotCommit:
    """Changes of a step to one layer. The same from step to step where nothing but numbers in tensors changes.

    columns: float32 `[R, K, n, S']`, what each of a row's last n tokens gave to the slots, and in the first what all
    before it gave. evicted: which slots, bool `[R, K, S]`, the new ones counted. queries: the step's, float32
    `[R, T, H, D]`, for a ring `[R, Q, H, D]`: position p's in p % Q.
    """

    lists: SlotTable
    columns: Tensor | None = None
    evicted: Tensor | EvictLowest | None = None
    queries: Tensor | None = None
    ring: Tensor | None = None

    def like(self, *parts: SlotTable | Tensor | EvictLowest | None) -> bool:
        """Whether it is made of these."""
        return all(map(is_, parts, (self.lists, self.columns, self.evicted, self.queries, self.ring)))
