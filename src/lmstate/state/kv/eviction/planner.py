"""What a commit evicts of an evicting layer, and what the host knows of its lists then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops.attention.slots import scores_after
from lmstate.ops.types.slot_table import EvictLowest
from lmstate.state.kv.eviction.query_ring import LastQueries
from lmstate.state.kv.eviction.slot_store import Arrays, Occupancy, SlotStore
from lmstate.state.kv.policies.base import Budget, Evicting, Slots
from lmstate.state.step import Step

FEW = 32  # slots of a head that are looked for one after another


@dataclass
class StepChunk:
    """A step, or a part of one, whose tokens lie behind the filled slots, and what its queries saw."""

    step: Step
    starts: Tensor  # int64 [R]: how many slots were filled before, of the fullest head
    columns: Tensor | None = None  # float32 [R, K, n, S]: see `ops.attend_slots.AttentionSums`
    queries: Tensor | None = None  # float32 [R, T, H, D]


class EvictionPlan(NamedTuple):
    """What a commit evicts, how many graves that takes, and what the host knows then."""

    evicted: Tensor | EvictLowest | None
    undo_slots: int
    after: Occupancy


class EvictingLayer(Protocol):
    """A layer that forgets."""

    held: SlotStore
    queries: LastQueries | None

    def read(self, arrays: Arrays) -> tuple[Tensor, Tensor]:
        """`Slots.keys` and `Slots.values` of slots stored as `arrays`."""
        ...

    def turn(self, x: Tensor, delta: int) -> Tensor:
        """`Slots.turn`."""
        ...


class EvictionPlanner:
    """Asks a layer's policy what goes, where the numbers of slots do not tell.

    `exact`: something else of the layer reaches no farther back than `rewind`. `scale`: of query-key products. The
    layer is given to each call and not held, so that a state that is dropped is gone at once.
    """

    def __init__(self, policy: Evicting, sight: ops.CausalMask, rewind: int, scale: float, *, exact: bool):
        self.policy, self.sight, self.rewind, self.scale, self.exact = policy, sight, rewind, scale, exact
        self._lowest = policy.lowest if isinstance(policy, Budget) and policy.plain else None
        self.foresees = sight == ops.FULL_CAUSAL and policy.excess(0) is not None
        """Whether heads that are alike in number stay so."""

    def verdict(self, layer: EvictingLayer, part: StepChunk, accepted: tuple[int, ...]) -> EvictionPlan:
        """Of the first `accepted` tokens of a part; the same one for all layers that fare alike, if foreseen."""
        step, held, queries = part.step, layer.held, layer.queries
        if self.foresees and held.ledger.even:
            key = ("verdict", id(self.policy), accepted, held.ledger)
            if (verdict := step.cached(key, lambda: self._foreseen(held, step, accepted))) is not None:
                return verdict
        positions, filled = held.with_new(step.starts, accepted)
        scores = None
        if part.columns is not None:
            scores = torch.zeros(positions.shape, dtype=torch.float32, device=positions.device)
            counted, before = held.lists.filled.tolist(), held.lists.stored["scores"]
            for r, (start, count, n) in enumerate(zip(step.starts, step.counts, accepted)):
                for h in range(scores.shape[1]) if n else ():
                    own = before[r, h, start % before.shape[2]]
                    *_, (_, last) = scores_after(own, part.columns[r, h], counted[r][h], count, n)
                    scores[r, h, : len(last)] = last
        if queries is not None and part.queries is not None:
            queries = queries.clone()
            for row, n in enumerate(accepted):
                if n:
                    queries.put(row, step.starts[row], part.queries[row, :n])
        lengths = [start + n for start, n in zip(step.starts, accepted)]
        arrays = {**held.lists.stored, "position": positions}
        gone = self.evicted(layer, arrays, filled, scores, lengths, range(step.rows), queries)
        if gone is None:
            return self._verdict(held, step, accepted, None, (0,) * step.rows)
        gone = gone & torch.tensor([n > 0 for n in accepted], device=positions.device)[:, None, None]
        return self._verdict(held, step, accepted, gone, tuple(gone.sum(-1).amax(-1).tolist()))

    def evicted(
        self,
        layer: EvictingLayer,
        arrays: Arrays,
        alive: Tensor,
        scores: Tensor | None,
        lengths: Sequence[int],
        rows: Sequence[int],
        queries: LastQueries | None,
    ) -> Tensor | None:
        """bool `[R, K, S]`: what goes of the slots that are `alive`, once the policy has had its say; None: nothing."""
        position, gone = arrays["position"], None
        at = torch.tensor(lengths, device=position.device)[:, None, None]
        if self.sight != ops.FULL_CAUSAL:
            gone = alive & self.sight.lost(position, at)
            alive = alive & ~gone
        if not alive.numel() or int(alive.sum(-1).max()) <= self.policy.most:
            return gone
        asked = queries.before(rows, lengths) if queries is not None else (at.new_zeros(0), at.new_zeros(0))
        slots = Slots(
            position, alive, at, torch.zeros_like(position, dtype=torch.float32) if scores is None else scores,
            *asked, self.scale, lambda: layer.read(arrays), layer.turn,
        )  # fmt: skip
        evicted = self.policy.evict(slots) & alive
        return evicted if gone is None else gone | evicted

    def _foreseen(self, held: SlotStore, step: Step, accepted: tuple[int, ...]) -> EvictionPlan | None:
        """The verdict where as many slots of all heads of a row go, and it is clear which; else None."""
        lost = tuple(self.policy.excess(most + n) or 0 if n else 0 for most, n in zip(held.most, accepted))
        if not any(lost):
            return self._verdict(held, step, accepted, None, lost)
        if self._lowest is None or max(lost) > FEW:
            return None
        return self._verdict(held, step, accepted, self._lowest, lost)

    def _verdict(
        self,
        held: SlotStore,
        step: Step,
        accepted: tuple[int, ...],
        evicted: Tensor | EvictLowest | None,
        lost: tuple[int, ...],
    ) -> EvictionPlan:
        """`lost`: how many slots of each row's heads go, or of the head that loses most."""
        ledger, rewind = held.ledger, self.rewind
        after = tuple(
            row.settled(n, gone, start + n, rewind, exact=self.exact) if n else row
            for row, start, n, gone in zip(ledger.rows, step.starts, accepted, lost)
        )
        wanted = max(row.undoable + gone for row, gone in zip(ledger.rows, lost)) if rewind else 0
        # One for all that have come to the same: what they ask the step for next time, they ask for with this.
        same = step.cached(("ledger", after, ledger.even), lambda: Occupancy(after, ledger.even))
        return EvictionPlan(evicted, wanted, same)


def numbers(step: Step, values: tuple[int, ...]) -> Tensor:
    """int64 `[R]`, made once in a step for all layers that have the same."""
    return step.cached(("numbers", values), lambda: torch.tensor(values, dtype=torch.int64, device=step.device))
