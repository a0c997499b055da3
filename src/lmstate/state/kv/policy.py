"""What a storage policy is: which slots a layer keeps, apart from how it stores them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lmstate.errors import StateError
from lmstate.state.kv.storage import Dense, Policy, Storage


@dataclass(frozen=True)
class Slots:
    """What a policy decides on: the slots of every row and kv head, once the rows hold `lengths` tokens.

    Slots lie in no order; `positions` int32 `[R, K, S]` says whose each is. Only those where `alive` bool `[R, K, S]`
    count. `scores` float32 `[R, K, S]`: the sums of the attention that each slot has received (from every query since
    it was stored, averaged over the query heads of its group); zeros unless the policy `observes` attention.
    `queries` float32 `[R, W, H, D]`: the last W queries, rotated, the newest last, where the policy asks for them;
    `asked` bool `[R, W]` where there is one.
    """

    positions: Tensor
    alive: Tensor
    lengths: Tensor  # int64 [R, 1, 1]
    scores: Tensor
    queries: Tensor
    asked: Tensor
    scale: float  # of query-key products
    read: Callable[[], tuple[Tensor, Tensor]] = field(repr=False)
    turn: Callable[[Tensor, int], Tensor] = field(repr=False)  # (vectors [A, B, D], delta): as if delta positions on

    @cached_property
    def _stored(self) -> tuple[Tensor, Tensor]:
        return self.read()

    @property
    def keys(self) -> Tensor:
        """float32 `[R, K, S, D]`, rotated for their positions."""
        return self._stored[0]

    @property
    def values(self) -> Tensor:
        """float32 `[R, K, S, Dv]`."""
        return self._stored[1]


@dataclass(frozen=True)
class Evicting(Policy):
    """A policy that forgets: after each step that is committed, `evict` says which slots go.

    A new token always sees all that was kept, and the tokens of its own step (attend, then evict).
    """

    storage: Storage = field(default=Dense(), kw_only=True)

    observes = False
    """Whether `Slots.scores` is wanted. Costs a float32 a slot for each of the last `rewind` tokens."""

    @property
    def asks(self) -> int:
        """How many of the last queries `Slots.queries` should hold."""
        return 0

    @property
    @abstractmethod
    def most(self) -> int:
        """The slots of a head that may stay. A layer whose window is no longer than this forgets nothing more."""

    @abstractmethod
    def evict(self, slots: Slots) -> Tensor:
        """bool `[R, K, S]`: the slots that go. Called where some head holds more than `most`."""


@dataclass(frozen=True)
class Budget(Evicting):
    """Keeps, in every head, the `budget` slots that `rank` puts highest: the base of most policies.

    The first `sinks` positions and the last `recent` ones are kept whatever their rank (Xiao et al. 2023, 2309.17453).
    """

    budget: int = 2048
    recent: int = 0
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 0 or self.budget < max(1, self.sinks + self.recent):
            raise StateError(
                f"{type(self).__name__}(budget={self.budget}, recent={self.recent}, sinks={self.sinks}) was asked for; "
                f"the budget holds the sinks and the recent tokens: make it at least {self.sinks + self.recent}"
            )

    @property
    def most(self) -> int:
        return self.budget

    @abstractmethod
    def rank(self, slots: Slots) -> Tensor:
        """float32 `[R, K, S]`: the lowest go first."""

    def evict(self, slots: Slots) -> Tensor:
        positions = slots.positions
        guarded = (positions < self.sinks) | (positions >= slots.lengths - self.recent)
        ranks = self.rank(slots).masked_fill(guarded, torch.inf).masked_fill(~slots.alive, torch.inf)
        excess = slots.alive.sum(-1, keepdim=True) - self.budget  # [R, K, 1]
        lowest = ranks.topk(max(int(excess.max()), 0), largest=False).indices  # [R, K, n]
        goes = torch.arange(lowest.shape[-1], device=excess.device) < excess
        return torch.zeros_like(slots.alive).scatter_(-1, lowest, goes)
