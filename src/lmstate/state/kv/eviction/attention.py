"""The state of an attention layer that evicts: slots that a policy keeps, in every kv head by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import PendingError
from lmstate.ops.attention.attend_quantized import attend_quantized
from lmstate.ops.attention.attend_slots import attend_observed, attend_slots
from lmstate.ops.attention.slots import commit_slots_reference, prepare_commit
from lmstate.ops.types.params import AttentionSums
from lmstate.ops.types.slot_table import SlotCommit
from lmstate.state.changes import Changes
from lmstate.state.gradients import refused, wanted
from lmstate.state.kv.eviction.codec import Codec
from lmstate.state.kv.eviction.planner import EvictionPlanner, StepChunk, counts_tensor
from lmstate.state.kv.eviction.query_ring import LastQueries
from lmstate.state.kv.eviction.slot_store import Arrays, SlotStore
from lmstate.state.kv.policies.base import Evicting
from lmstate.state.kv.quantized.attention import REFUSAL, quantized_kv
from lmstate.state.layers.attention import KeyValueState
from lmstate.state.layers.base import Layout
from lmstate.state.step import Step

ROOM = 16  # slots to spare when the arrays are made again
LOSS = "the slots of a policy that evicts"


class EvictingState(KeyValueState):
    """Slots of keys and values in lists that are filled from the front, in no order; see `SlotStore`.

    A step's tokens are after the filled slots, where a discard leaves them. The commit counts them as filled, and has
    what the policy evicts moved to the undo log, from where a rewind inside the window brings it back. So attention
    reads a list as it reads a ring that has not wrapped, whose positions are the indices of slots. A step of several
    chunks, which is never speculative, evicts between them, in copies.
    """

    lossy = True
    evicts = True
    rotated = "k"  # the tensor that is rotated where positions move

    def __init__(
        self,
        layout: Layout,
        policy: Evicting,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        mask: ops.CausalMask = ops.FULL_CAUSAL,
        rotate_by: Callable[[Tensor, int], Tensor] | None = None,
        heads: int,
        scale: float,
        query_dim: int | None = None,
    ):
        """`heads` of queries, the `scale` of their products with keys; `query_dim`: their width, if not that of keys.

        The other arguments are `AttentionState`'s.
        """
        self.layout, self.policy, self.rotate_by, self.mask = layout, policy, rotate_by, mask
        self._sees_all = mask == ops.FULL_CAUSAL
        self.kind = "attention" if mask.span is None else "window"
        self.codec = Codec(policy.storage, {"k": head_dim, "v": value_dim or head_dim}, layout.dtype)
        self.history = layout.rewind + 1 if policy.observes else 0  # lengths whose scores are kept, one in n % history
        self.slot_store = SlotStore.empty(layout.rows, kv_heads, self.codec.tensors, self.history, layout.device)
        self.queries = LastQueries(policy.asks, layout, heads, query_dim or head_dim) if policy.asks else None
        exact = self.history > 0 or self.queries is not None
        self.planner = EvictionPlanner(policy, mask, layout.rewind, scale, exact=exact)
        self._chunk: StepChunk | None = None
        self._speculative = False
        self._followed = False  # whether anything stored had a gradient to follow
        self._saved: tuple[SlotStore, LastQueries | None] | None = None

    @property
    def slots(self) -> int:
        """S."""
        return self.slot_store.slots

    @property
    def arrays(self) -> Arrays:
        return self.slot_store.table.stored

    # ---- the step

    def reserve(self, step: Step) -> None:
        self.discard()
        self._speculative = step.speculative
        before = (self.slot_store, self.queries)
        written = any(x.requires_grad for x in self.arrays.values())  # a backward pass reads them as they are
        if written or (not step.speculative and step.width > step.chunk):  # commits its chunks one by one
            self.slot_store = self.slot_store.clone()
            self.queries = None if self.queries is None else self.queries.clone()
        self._make_room(step.width if step.speculative else min(step.width, step.chunk))
        self._saved = before if self.slot_store is not before[0] else None

    def view(self, step: Step) -> ops.KVView | None:
        chunk = self._enter(step)
        store = self.slot_store
        if not self._as_ring(step) or not store.occupancy.uniform:
            return None
        view, stored = store.view, store.table.stored
        if view is None or view.columns is not chunk.columns or view.queries is not chunk.queries:
            quantized = None if (bits := self.codec.bits) is None else quantized_kv(stored, bits)
            view = store.view = ops.KVView(
                stored["k"], stored["v"], columns=chunk.columns, queries=chunk.queries, quantized=quantized
            )  # fmt: skip
        view.starts = chunk.starts
        return view

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        params: ops.AttentionParams,
        rotation: ops.RopeTables | None = None,
    ) -> Tensor:
        seen = self._attend(q, new, step, params, rotation)
        return refused(seen, LOSS) if self._loses(step, q, *(new or ())) else seen

    def _attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        params: ops.AttentionParams,
        rotation: ops.RopeTables | None,
    ) -> Tensor:
        chunk = self._enter(step)
        # Slopes want positions, and the slots of a ring are counted as such only where nothing was evicted.
        uniform = self.slot_store.occupancy.uniform and self._as_ring(step) and not params.reads_distance
        ends = chunk.starts + chunk.counts
        columns = None if new is None or chunk.columns is None else AttentionSums(chunk.columns, ends)
        if columns is not None:
            columns.sums.zero_()
        if self.codec.bits is not None and uniform and self.queries is None:
            return self._attend_codes(q, new, rotation, chunk, params, columns)
        if rotation is not None:
            q = ops.rope(q, *rotation)
            new = None if new is None else (ops.rope(new[0], *rotation), new[1])
        if new is not None and self.queries is not None:
            chunk.queries = q.detach().float().contiguous()
        if self.codec.bits is not None and uniform:
            return self._attend_codes(q, new, None, chunk, params, columns)
        if new is not None:
            self._store(new, step)
        transformed, (k, v) = self.codec.transform(q), self.codec.decode(self.arrays)
        if uniform:
            if columns is None:
                seen = ops.attend(transformed, k, v, chunk.starts, chunk.counts, params)
            else:
                seen = attend_observed(transformed, k, v, chunk.starts, chunk.counts, params, columns)
        else:
            where, filled = self.slot_store.with_new(step.starts, step.counts)
            columns = None if columns is None else columns._replace(ends=chunk.positions + chunk.counts)
            positions = torch.where(filled, where, -1)
            seen = attend_slots(transformed, k, v, positions, chunk.positions, chunk.counts, params, self.mask, columns)
        return self.codec.transform(seen)

    def commit(self, step: Step, accepted: tuple[int, ...], changes: Changes) -> None:
        if self._chunk is None:
            self._abandon(changes)
            return
        # The chunks of a certain step are committed but for the last, and such a step is accepted whole.
        self._commit_chunk(accepted if step.speculative else self._chunk.step.counts, changes)
        changes.assign(self, "_saved", None)

    def discard(self) -> None:
        if self._chunk is not None or self._saved is not None:
            changes = Changes()
            self._abandon(changes)
            changes.apply()

    def _abandon(self, changes: Changes) -> None:
        self._leave(self.slot_store, self.slot_store.slot_commit, changes)
        if self._saved is not None:
            store, queries = self._saved
            self._leave(store, store.slot_commit, changes)
            changes.assign(self, "slot_store", store)
            changes.assign(self, "queries", queries)
            changes.assign(self, "_saved", None)

    # ---- moving about

    def earliest_rewind(self, row: int, length: int) -> int:
        return min(self.slot_store.occupancy.rows[row].floor, length)

    def rewind(self, row: int, length: int, to: int, changes: Changes) -> None:
        if to == length:
            return
        store, one = self.slot_store, self.slot_store.selected([row])
        one.rewind(to)
        scores = one.table.stored["scores"][:, :, to % self.history] if self.history else None
        # As if the row's last commit had ended here: a step that went farther evicted later.
        gone = self.planner.evicted(self, one.table.stored, one.filled(), scores, [to], [row], self.queries)
        if gone is not None:
            count = int(gone.sum(-1).max())
            if self.layout.rewind and (wanted := one.occupancy.rows[0].undoable + count) > store.undo_slots:
                store, one = store.with_undo_slots(wanted), one.with_undo_slots(wanted)
            one.evict(gone, to, count)
        self._hold(store.with_row(row, one), changes)

    def select(self, rows: Sequence[int | None], changes: Changes) -> None:
        changes.assign(self, "slot_store", self.slot_store.selected(rows))
        if self.queries is not None:
            changes.assign(self, "queries", self.queries.select(rows))

    def add_row(self, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        if self._chunk is not None:
            raise PendingError(
                "a row was to be added beside pending tokens of a layer that evicts; call commit or discard first"
            )
        rows = [*range(len(self.slot_store.most)), None]
        queries = None if self.queries is None else self.queries.select(rows)
        self._put(self.slot_store.selected(rows), queries, len(rows) - 1, length, tensors, changes)

    def capture(self, row: int, length: int) -> Mapping[str, Tensor]:
        captured = self.slot_store.captured(row, length)
        return captured if self.queries is None else {**captured, "queries": self.queries.held(row, length)}

    def restore(self, row: int, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        ring = None if self.queries is None else self.queries.clone()
        self._put(self.slot_store, ring, row, length, tensors, changes)

    def _put(
        self,
        store: SlotStore,
        ring: LastQueries | None,
        row: int,
        length: int,
        tensors: Mapping[str, Tensor],
        changes: Changes,
    ) -> None:
        """Have a copy of `store`, and `ring` itself, hold in a row what was captured at `length`."""
        stored, queries = {}, None
        if tensors or length:
            queries = None if ring is None else ring.check(length, tensors)
            own = tensors if queries is None else {name: x for name, x in tensors.items() if name != "queries"}
            stored = store.restorable(length, own)
        most = stored["position"].shape[-1] if stored else 0
        store = (store if most <= store.slots else store.resized(most)).clone()
        store.empty_row(row)
        if most:
            store.put(row, stored, stored["position"] >= 0)
        store.reaches(row, length)
        store.count()
        self._hold(store, changes)
        if ring is not None:
            ring.clear(row, length, queries)
            changes.assign(self, "queries", ring)

    def kept(self, row: int, length: int) -> list[list[int]]:
        positions, filled = self.arrays["position"][row], self.slot_store.table.filled[row].tolist()
        low = self.mask.first_visible(length)
        return [sorted(p for p in head[:n].tolist() if p >= low) for head, n in zip(positions, filled)]

    def refuses_drop(self, row: int) -> str | None:
        if self.codec.bits is not None:
            return REFUSAL
        return None if self.mask == ops.FULL_CAUSAL else "its window has forgotten earlier tokens"

    def drop(self, row: int, length: int, start: int, stop: int, changes: Changes) -> None:
        one = self.slot_store.selected([row])
        arrays, alive = one.table.stored, one.filled()
        position = arrays["position"]
        later, left = position >= stop, alive & ((position < start) | (position >= stop))
        arrays["position"] = torch.where(later, position - (stop - start), position)
        stored = arrays[self.rotated]
        turned = stored[0] if self.rotate_by is None else self.rotate_by(stored[0], start - stop).to(stored)
        arrays[self.rotated] = torch.where(later[..., None], turned, stored)
        if self.history:
            scores = arrays["scores"]
            arrays["scores"] = scores[:, :, length % self.history, None].expand_as(scores)

        store = self.slot_store.clone()
        store.empty_row(row)
        store.put(row, arrays, left)
        store.reaches(row, length - (stop - start))
        store.count()
        self._hold(store, changes)
        if self.queries is not None:
            queries = self.queries.clone()
            queries.close(row, length, start, stop, self.rotate)
            changes.assign(self, "queries", queries)

    def tensors(self) -> list[Tensor]:
        store, queries = (self.slot_store, self.queries) if self._saved is None else self._saved
        tensors = [*self.slot_store.tensors(), *store.tensors(), *self.slot_store.spare(), *store.spare()]
        for one in (self.queries, queries):
            tensors += one.tensors() if one is not None else []
        if self._chunk is not None:
            tensors += [x for x in (self._chunk.columns, self._chunk.queries) if x is not None]
        return list({tensor.data_ptr() if tensor.numel() else id(tensor): tensor for tensor in tensors}.values())

    # ---- the parts of it

    def _hold(self, store: SlotStore, changes: Changes) -> None:
        """A row changed while others are pending: a discard may no longer go back to the arrays before the step."""
        changes.assign(self, "slot_store", store)
        changes.assign(self, "_saved", None)

    def _as_ring(self, step: Step) -> bool:
        """Whether a step sees all that is filled: what is out of a token's sight is evicted before it comes."""
        return self._sees_all or step.width == 1

    def _make_room(self, width: int) -> None:
        """Have `width` slots after the filled ones, and not many more; the arrays are replaced, never written.

        Slots evicted lately may go back to their places, where their scores still are: these places stay.
        """
        need, slots = max(self.slot_store.most) + width, self.slot_store.slots
        size = max(need, min(need + need // 4, self.policy.most + width) + ROOM)
        least = max(size, *(row.slots for row in self.slot_store.occupancy.rows))
        if need > slots:
            self.slot_store = self.slot_store.resized(size)
        elif slots > least + least // 8 + 2 * ROOM:
            self.slot_store = self.slot_store.resized(least)

    def _enter(self, step: Step) -> StepChunk:
        """Commit the chunk of the step before this one, and have room for this one."""
        chunk = self._chunk
        if chunk is not None and chunk.step is step:
            return chunk
        if chunk is not None:
            changes = Changes()
            self._commit_chunk(chunk.step.counts, changes)
            changes.apply()
            self._make_room(step.width)
        chunk = self._chunk = StepChunk(step, counts_tensor(step, self.slot_store.most))
        if (spare := self.slot_store.slot_commit) is not None and step.width == 1:
            chunk.columns, chunk.queries = spare.columns, spare.queries
            return chunk
        if self.history:
            planes = step.width if self._speculative else min(step.width, self.history)
            shape = (*self.slot_store.table.filled.shape, planes, self.slot_store.slots)
            chunk.columns = torch.empty(shape, dtype=torch.float32, device=self.layout.device)
        chunk.queries = None if self.queries is None else self.queries.room(step.width)
        return chunk

    def _leave(self, store: SlotStore, commit: SlotCommit | None, changes: Changes) -> None:
        """Be done with the chunk; the view that it read serves again if the buffers of its commit do."""
        changes.assign(self, "_chunk", None)
        if (view := store.view) is not None:
            changes.assign(view, "starts", None)
            if commit is None or view.columns is not commit.columns or view.queries is not commit.queries:
                changes.assign(store, "view", None)

    def _loses(self, step: Step, *tensors: Tensor) -> bool:
        """Whether a gradient is lost: codes have none, nor have slots that an earlier step or chunk has filled."""
        if not wanted(*tensors):
            return False
        loses = self.codec.bits is not None or (self._followed and any(step.starts))
        self._followed = True
        return loses

    def _store(self, new: tuple[Tensor, Tensor], step: Step) -> None:
        """Put keys and values `[R, T, K, D]` after the filled slots."""
        filled, arrays = self.slot_store.table.filled, self.arrays
        coded = self.codec.encode(*new)
        if self.slot_store.occupancy.uniform and self.codec.bits is None:
            assert self._chunk is not None
            ops.append(coded["k"], coded["v"], arrays["k"], arrays["v"], self._chunk.starts, self._chunk.counts)
            return
        for r, count in enumerate(step.counts):
            for h, first in enumerate(filled[r].tolist()):
                for name, stored in coded.items():
                    arrays[name][r, h, first : first + count] = stored[r, :count, h].to(arrays[name])

    def _attend_codes(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        rotation: ops.RopeTables | None,
        chunk: StepChunk,
        params: ops.AttentionParams,
        columns: AttentionSums | None,
    ) -> Tensor:
        bits, arrays = self.codec.bits, self.arrays
        assert bits is not None
        return attend_quantized(
            q, new, rotation, quantized_kv(arrays, bits), chunk.starts, chunk.counts, params, columns=columns
        )

    def _commit_chunk(self, accepted: tuple[int, ...], changes: Changes) -> None:
        """Make the first accepted tokens of the chunk real, and evict."""
        chunk, store, queries = self._chunk, self.slot_store, self.queries
        assert chunk is not None
        step = chunk.step
        evicted, wanted, after = self.planner.plan(self, chunk, accepted)
        if wanted > store.undo_slots or store.undo_slots > 2 * wanted + 4 * ROOM:
            store = store.with_undo_slots(wanted + ROOM if wanted else 0)
        spans = chunk.positions, chunk.counts, counts_tensor(step, accepted)
        native = prepare_commit(*spans)
        if native is None or any(x.requires_grad for x in store.table.stored.values()):
            store, queries = store.clone(), None if queries is None else queries.clone()
        ring = None if queries is None else queries.made()
        commit = store.slot_commit
        if commit is None or not commit.like(store.table, chunk.columns, evicted, chunk.queries, ring):
            commit = SlotCommit(store.table, chunk.columns, evicted, chunk.queries, ring)
        if native is None:
            commit_slots_reference(commit, *spans)
        else:
            changes.batch(("slots", id(step), accepted), native, commit)
        if queries is not None:
            rows = enumerate(zip(queries.low, step.starts, accepted))
            low = [queries.low_after(row, start, start + n) if n else low for row, (low, start, n) in rows]
            changes.assign(queries, "low", low)
        again = commit if step.width == 1 and not isinstance(evicted, Tensor) else None
        changes.assign(store, "occupancy", after)
        changes.assign(store, "slot_commit", again)
        changes.assign(self, "slot_store", store)
        changes.assign(self, "queries", queries)
        self._leave(store, again, changes)

    def rotate(self, x: Tensor, delta: int) -> Tensor:
        return x if self.rotate_by is None else self.rotate_by(x, delta)

    def read(self, arrays: Arrays) -> tuple[Tensor, Tensor]:
        k, v = self.codec.decode(arrays)
        return self.codec.transform(k.float()), self.codec.transform(v.float())
