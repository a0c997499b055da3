"""The interface of policies that evict: which slots a layer keeps, apart from how it stores them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lmstate.errors import StateError
from lmstate.ops.attention.slots import behind_all, lowest
from lmstate.ops.types.slot_table import EvictLowest
from lmstate.state.kv.policies.storage import Dense, Storage
from lmstate.state.layers.base import Policy
from lmstate.state.validate import whole_number


@dataclass(frozen=True)
class Slots:
    """The slots that a policy decides on, of every row and kv head, once the rows hold `lengths` tokens.

    Slots are in no order; `positions` int32 `[R, K, S]` says whose each is. Only those where `alive` bool `[R, K, S]`
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

    def __post_init__(self) -> None:
        storage: object = self.storage
        if not isinstance(storage, Storage):
            raise StateError(
                f"{type(self).__name__}(storage={storage!r:.80}) was asked for; "
                "slots are stored as kv.Dense() or kv.Quantized(8), say"
            )

    observes = False
    """Whether `Slots.scores` is wanted. Costs a float32 a slot for each of the last `rewind` tokens."""

    @property
    def asks(self) -> int:
        """Number of last queries that `Slots.queries` should hold."""
        return 0

    @property
    @abstractmethod
    def most(self) -> int:
        """The slots of a head that may stay. A layer whose window is no longer than this forgets nothing more."""

    @abstractmethod
    def evict(self, slots: Slots) -> Tensor:
        """bool `[R, K, S]`: the slots that go. Called where some head holds more than `most`."""

    def excess(self, held: int) -> int | None:
        """Number of slots that `evict` takes from a head of `held` slots; None where it depends on more than that."""
        return None


@dataclass(frozen=True)
class Budget(Evicting):
    """Keeps, in every head, the `budget` slots that `rank` puts highest: the base of most policies.

    The first `sinks` positions and the `newest` ones are kept whatever their rank (Xiao et al. 2023, 2309.17453).
    """

    budget: int = 2048
    recent: int = 0
    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("budget", "recent", "sinks"):
            whole_number(getattr(self, name), f"{name} of {type(self).__name__}")
        guarded = self.sinks + self.newest + max(self.batch, 0)
        if min(self.sinks, self.recent, self.batch) < 0 or self.budget < max(1, guarded):
            raise StateError(
                f"{self} was asked for; the budget holds the sinks, the newest tokens and what is evicted at a time: "
                f"make it at least {guarded}, and no number negative"
            )

    @property
    def newest(self) -> int:
        """Number of last positions that are kept whatever their rank."""
        return self.recent

    @property
    def batch(self) -> int:
        """Least number of slots to evict at a time: more than one where ranking costs much."""
        return 0

    @property
    def most(self) -> int:
        return self.budget

    def rank(self, slots: Slots) -> Tensor:
        """float32 `[R, K, S]`: the lowest go first. By default those of least attention, if observed, or the oldest."""
        return slots.scores if self.observes else slots.positions.float()

    @property
    def plain(self) -> bool:
        """Whether ranks are the default ones, which need not be asked for."""
        return type(self).rank is Budget.rank and type(self).evict is Budget.evict

    def excess(self, held: int) -> int | None:
        if type(self).evict is not Budget.evict:
            return None
        return self.lowest.excess(held)

    @property
    def lowest(self) -> EvictLowest:
        """The evictions where ranks are the default ones."""
        return EvictLowest(self.budget, self.batch, self.sinks, self.newest, self.observes)

    def evict(self, slots: Slots) -> Tensor:
        positions = slots.positions
        guarded = (positions < self.sinks) | (positions >= slots.lengths - self.newest)
        ranks = behind_all(self.rank(slots).float(), guarded | ~slots.alive)
        excess = slots.alive.sum(-1, keepdim=True) - self.budget  # [R, K, 1]
        excess = torch.where(excess > 0, excess.clamp(min=self.batch), 0)
        return lowest(ranks, positions, excess)
