"""The evictions of a commit, and the counts of slots that the host expects after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """A step, or a chunk of one, whose tokens are after the filled slots, and what its queries saw."""

    step: Step
    starts: Tensor  # int64 [R]: how many slots were filled before, of the fullest head
    columns: Tensor | None = None  # float32 [R, K, n, S]: see `ops.attend_slots.AttentionSums`
    queries: Tensor | None = None  # float32 [R, T, H, D]

    @property
    def counts(self) -> Tensor:
        """int64 [R]: its tokens, on the device as `starts` is."""
        return counts_tensor(self.step, self.step.counts)

    @property
    def positions(self) -> Tensor:
        """int64 [R]: those of its first tokens, on the device."""
        return counts_tensor(self.step, self.step.starts)


class EvictionPlan(NamedTuple):
    """The slots that a commit evicts, the undo slots that it takes, and the counts after it."""

    evicted: Tensor | EvictLowest | None
    undo_slots: int
    after: Occupancy


class EvictingLayer(Protocol):
    """A layer that evicts."""

    slot_store: SlotStore
    queries: LastQueries | None

    def read(self, arrays: Arrays) -> tuple[Tensor, Tensor]:
        """`Slots.keys` and `Slots.values` of slots stored as `arrays`."""
        ...

    def rotate(self, x: Tensor, delta: int) -> Tensor:
        """`Slots.turn`."""
        ...


class EvictionPlanner:
    """Asks a layer's policy which slots go, where their counts alone do not tell.

    `exact`: something else of the layer reaches no farther back than `rewind`. `scale`: of query-key products. The
    layer is given to each call and not held, so that a state that is dropped is gone at once.
    """

    def __init__(self, policy: Evicting, mask: ops.CausalMask, rewind: int, scale: float, *, exact: bool):
        self.policy, self.mask, self.rewind, self.scale, self.exact = policy, mask, rewind, scale, exact
        self._lowest = policy.lowest if isinstance(policy, Budget) and policy.plain else None
        self.predicts_counts = mask == ops.FULL_CAUSAL and policy.excess(0) is not None
        """Whether heads that are alike in number stay so."""

    def plan(self, layer: EvictingLayer, chunk: StepChunk, accepted: tuple[int, ...]) -> EvictionPlan:
        """The plan for the first `accepted` tokens of a chunk; where predicted, one for all layers that fare alike."""
        step, store, queries = chunk.step, layer.slot_store, layer.queries
        if self.predicts_counts and store.occupancy.uniform:
            key = ("plan", id(self.policy), accepted, store.occupancy)
            if (plan := step.cached(key, lambda: self._predicted(store, step, accepted))) is not None:
                return plan
        positions, filled = store.with_new(step.starts, accepted)
        scores = None
        if chunk.columns is not None:
            scores = torch.zeros(positions.shape, dtype=torch.float32, device=positions.device)
            counted, before = store.table.filled.tolist(), store.table.stored["scores"]
            for r, (start, count, n) in enumerate(zip(step.starts, step.counts, accepted)):
                for h in range(scores.shape[1]) if n else ():
                    own = before[r, h, start % before.shape[2]]
                    *_, (_, last) = scores_after(own, chunk.columns[r, h], counted[r][h], count, n)
                    scores[r, h, : len(last)] = last
        if queries is not None and chunk.queries is not None:
            queries = queries.clone()
            for row, n in enumerate(accepted):
                if n:
                    queries.put(row, step.starts[row], chunk.queries[row, :n])
        lengths = [start + n for start, n in zip(step.starts, accepted)]
        arrays = {**store.table.stored, "position": positions}
        gone = self.evicted(layer, arrays, filled, scores, lengths, range(step.rows), queries)
        if gone is None:
            return self._plan(store, step, accepted, None, (0,) * step.rows)
        added = torch.tensor(accepted, device=positions.device)[:, None]
        gone = gone & (added > 0)[..., None]
        lost = gone.sum(-1)  # [R, K]
        plan = self._plan(store, step, accepted, gone, tuple(lost.amax(-1).tolist()))
        if plan.after.uniform and self.predicts_counts:
            return plan
        left = (store.table.filled + added - lost).tolist()
        rows = tuple(replace(row, most=max(heads)) for row, heads in zip(plan.after.rows, left))
        return plan._replace(after=Occupancy(rows, all(min(heads) == max(heads) for heads in left)))

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
        """bool `[R, K, S]`: the slots among those `alive` that the mask and the policy evict; None: none."""
        position, gone = arrays["position"], None
        at = torch.tensor(lengths, device=position.device)[:, None, None]
        if self.mask != ops.FULL_CAUSAL:
            gone = alive & self.mask.expired(position, at)
            alive = alive & ~gone
        if not alive.numel() or int(alive.sum(-1).max()) <= self.policy.most:
            return gone
        asked = queries.before(rows, lengths) if queries is not None else (at.new_zeros(0), at.new_zeros(0))
        slots = Slots(
            position, alive, at, torch.zeros_like(position, dtype=torch.float32) if scores is None else scores,
            *asked, self.scale, lambda: layer.read(arrays), layer.rotate,
        )  # fmt: skip
        evicted = self.policy.evict(slots) & alive
        return evicted if gone is None else gone | evicted

    def _predicted(self, store: SlotStore, step: Step, accepted: tuple[int, ...]) -> EvictionPlan | None:
        """The plan where as many slots of all heads of a row go, and it is clear which; else None."""
        lost = tuple(self.policy.excess(most + n) or 0 if n else 0 for most, n in zip(store.most, accepted))
        if not any(lost):
            return self._plan(store, step, accepted, None, lost)
        if self._lowest is None or max(lost) > FEW:
            return None
        return self._plan(store, step, accepted, self._lowest, lost)

    def _plan(
        self,
        store: SlotStore,
        step: Step,
        accepted: tuple[int, ...],
        evicted: Tensor | EvictLowest | None,
        lost: tuple[int, ...],
    ) -> EvictionPlan:
        """`lost`: how many slots of each row's heads go, or of the head that loses most."""
        before, rewind = store.occupancy, self.rewind
        after = tuple(
            row.after_step(n, gone, start + n, rewind, exact=self.exact) if n else row
            for row, start, n, gone in zip(before.rows, step.starts, accepted, lost)
        )
        wanted = max(row.undoable + gone for row, gone in zip(before.rows, lost)) if rewind else 0
        # One for all that have come to the same: what they ask the step for next time, they ask for with this.
        same = step.cached(("occupancy", after, before.uniform), lambda: Occupancy(after, before.uniform))
        return EvictionPlan(evicted, wanted, same)


def counts_tensor(step: Step, values: tuple[int, ...]) -> Tensor:
    """int64 `[R]`, made once in a step for all layers that have the same."""
    return step.cached(("counts", values), lambda: torch.tensor(values, dtype=torch.int64, device=step.device))
