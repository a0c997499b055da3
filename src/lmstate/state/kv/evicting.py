"""The state of an attention layer that forgets: which slots a policy keeps, in every kv head by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops.attend_quantized import attend_quantized
from lmstate.ops.attend_slots import Columns, attend_observed, attend_slots
from lmstate.ops.settle import Change, Settling
from lmstate.state.attention import KeyValueState
from lmstate.state.kv.codec import Codec
from lmstate.state.kv.judge import Judge, Part, numbers
from lmstate.state.kv.kept import Arrays, Kept
from lmstate.state.kv.policy import Evicting
from lmstate.state.kv.quantized import held
from lmstate.state.kv.queries import LastQueries
from lmstate.state.layer import Install, Layout
from lmstate.state.step import Step

ROOM = 16  # slots to spare when the arrays are made anew


class EvictingState(KeyValueState):
    """Slots of keys and values in lists that are filled from the front, in no order; see `Kept`.

    A step's tokens lie behind the filled slots, where a discard leaves them. The commit counts them as filled, and has
    what the policy evicts moved to the graves, from where a rewind inside the window brings it back. So attention reads
    a list as it reads a ring that has not wrapped, whose positions are the numbers of slots. A certain step of several
    parts evicts between them, in copies.
    """

    forgets = True
    evicts = True
    rotated = "k"  # the part that is turned where positions move

    def __init__(
        self,
        layout: Layout,
        policy: Evicting,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        sight: ops.Sight = ops.EVERYTHING,
        shift: Callable[[Tensor, int], Tensor] | None = None,
        heads: int,
        scale: float,
        query_dim: int | None = None,
    ):
        """`heads` of queries, the `scale` of their products with keys; `query_dim`: their width, if not that of keys.

        The other arguments are `AttentionState`'s.
        """
        self.layout, self.policy, self.shift, self.sight = layout, policy, shift, sight
        self._sees_all = sight == ops.EVERYTHING
        self.kind = "attention" if sight.reach is None else "window"
        self.codec = Codec(policy.storage, {"k": head_dim, "v": value_dim or head_dim}, layout.dtype)
        self.history = layout.rewind + 1 if policy.observes else 0  # lengths whose scores are kept, one in n % history
        self.held = Kept.empty(layout.rows, kv_heads, self.codec.parts, self.history, layout.device)
        self.queries = LastQueries(policy.asks, layout, heads, query_dim or head_dim) if policy.asks else None
        exact = self.history > 0 or self.queries is not None
        self.judge = Judge(policy, sight, layout.rewind, scale, exact=exact)
        self._part: Part | None = None
        self._tentative = False
        self._saved: tuple[Kept, LastQueries | None] | None = None

    @property
    def slots(self) -> int:
        """S."""
        return self.held.slots

    @property
    def arrays(self) -> Arrays:
        return self.held.lists.kept

    # ---- the step

    def reserve(self, step: Step) -> None:
        self.discard()
        self._tentative = step.tentative
        before = (self.held, self.queries)
        if not step.tentative and step.width > step.chunk:  # settles its parts one by one
            self.held = self.held.clone()
            self.queries = None if self.queries is None else self.queries.clone()
        self._make_room(step.width if step.tentative else min(step.width, step.chunk))
        self._saved = before if self.held is not before[0] else None

    def rings(self, step: Step) -> ops.Rings | None:
        part = self._enter(step)
        held = self.held
        if not self._as_rings(step) or not held.ledger.even:
            return None
        rings, kept = held.rings, held.lists.kept
        if rings is None or rings.columns is not part.columns or rings.queries is not part.queries:
            coded = None if (bits := self.codec.bits) is None else ops.Coded(bits, kept["k.scale"], kept["v.scale"])
            rings = held.rings = ops.Rings(
                kept["k"], kept["v"], columns=part.columns, queries=part.queries, coded=coded
            )  # fmt: skip
        rings.starts = part.starts
        return rings

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        scoring: ops.Scoring,
        rotation: ops.Rotation | None = None,
    ) -> Tensor:
        part = self._enter(step)
        even = self.held.ledger.even and self._as_rings(step)
        ends = part.starts + step.counts_t
        columns = None if new is None or part.columns is None else Columns(part.columns, ends)
        if columns is not None:
            columns.sums.zero_()
        if self.codec.bits is not None and even and self.queries is None:
            return self._attend_codes(q, new, rotation, part, scoring, columns)
        if rotation is not None:
            q = ops.rope(q, *rotation)
            new = None if new is None else (ops.rope(new[0], *rotation), new[1])
        if new is not None and self.queries is not None:
            part.queries = q.detach().float().contiguous()
        if self.codec.bits is not None and even:
            return self._attend_codes(q, new, None, part, scoring, columns)
        if new is not None:
            self._store(new, step)
        turned, (k, v) = self.codec.turn(q), self.codec.decode(self.arrays)
        if even:
            if columns is None:
                seen = ops.attend(turned, k, v, part.starts, step.counts_t, scoring)
            else:
                seen = attend_observed(turned, k, v, part.starts, step.counts_t, scoring, columns)
        else:
            where, filled = self.held.with_new(step.starts, step.counts)
            columns = None if columns is None else columns._replace(ends=step.starts_t + step.counts_t)
            positions = torch.where(filled, where, -1)
            seen = attend_slots(turned, k, v, positions, step.starts_t, step.counts_t, scoring, self.sight, columns)
        return self.codec.turn(seen)

    def commit(self, step: Step, accepted: tuple[int, ...]) -> Install | None:
        if self._part is None:
            return self.discard
        # The parts of a certain step are settled but for the last, and such a step is accepted whole.
        install_last = self._settle(accepted if step.tentative else self._part.step.counts)
        if self._saved is None:
            return install_last

        def install() -> None:
            install_last()
            self._saved = None

        return install

    def discard(self) -> None:
        if self._saved is not None:
            self._leave()
            self.held, self.queries = self._saved
        self._leave()
        self._saved = None

    # ---- moving about

    def reach(self, row: int, length: int) -> int:
        return min(self.held.ledger.rows[row].floor, length)

    def rewind(self, row: int, length: int, to: int) -> Install | None:
        if to == length:
            return None
        held, one = self.held, self.held.selected([row])
        one.went_back(to)
        scores = one.lists.kept["scores"][:, :, to % self.history] if self.history else None
        # As if the row's last commit had ended here: a step that went farther evicted later.
        gone = self.judge.evicted(self, one.lists.kept, one.filled(), scores, [to], [row], self.queries)
        if gone is not None:
            count = int(gone.sum(-1).max())
            if self.layout.rewind and (wanted := one.ledger.rows[0].buried + count) > held.graves:
                held, one = held.reburied(wanted), one.reburied(wanted)
            one.evict(gone, to, count)

        def install() -> None:
            held.assign(row, one)
            held.count()
            self._hold(held)

        return install

    def select(self, rows: Sequence[int | None]) -> Install | None:
        held = self.held.selected(rows)
        queries = None if self.queries is None else self.queries.select(rows)

        def install() -> None:
            self.held, self.queries = held, queries

        return install

    def capture(self, row: int, length: int) -> dict[str, Tensor]:
        captured = self.held.captured(row, length)
        return captured if self.queries is None else {**captured, "queries": self.queries.held(row, length)}

    def restore(self, row: int, length: int, tensors: dict[str, Tensor]) -> Install | None:
        stored, queries = {}, None
        if tensors or length:
            queries = None if self.queries is None else self.queries.check(length, tensors)
            own = tensors if queries is None else {name: x for name, x in tensors.items() if name != "queries"}
            stored = self.held.restorable(length, own)
        most = stored["position"].shape[-1] if stored else 0
        held = self.held if most <= self.held.slots else self.held.resized(most)

        def install() -> None:
            held.empty_row(row)
            if most:
                held.put(row, stored, stored["position"] >= 0)
            held.reaches(row, length)
            held.count()
            self._hold(held)
            if self.queries is not None:
                self.queries.clear(row, length, queries)

        return install

    def kept(self, row: int, length: int) -> list[list[int]]:
        positions, live = self.arrays["position"][row], self.held.lists.live[row].tolist()
        low = self.sight.low(length)
        return [sorted(p for p in head[:n].tolist() if p >= low) for head, n in zip(positions, live)]

    def refuses_drop(self, row: int) -> str | None:
        if self.codec.bits is not None:
            return "its keys are quantised as they were rotated, and never a second time"
        return None if self.sight == ops.EVERYTHING else "its window has forgotten earlier tokens"

    def drop(self, row: int, length: int, start: int, stop: int) -> Install | None:
        one = self.held.selected([row])
        arrays, alive = one.lists.kept, one.filled()
        position = arrays["position"]
        later, left = position >= stop, alive & ((position < start) | (position >= stop))
        arrays["position"] = torch.where(later, position - (stop - start), position)
        stored = arrays[self.rotated]
        turned = stored[0] if self.shift is None else self.shift(stored[0], start - stop).to(stored)
        arrays[self.rotated] = torch.where(later[..., None], turned, stored)
        if self.history:
            scores = arrays["scores"]
            arrays["scores"] = scores[:, :, length % self.history, None].expand_as(scores)

        def install() -> None:
            self.held.empty_row(row)
            self.held.put(row, arrays, left)
            self.held.reaches(row, length - (stop - start))
            self.held.count()
            if self.queries is not None:
                self.queries.close(row, length, start, stop, self.turn)

        return install

    def tensors(self) -> list[Tensor]:
        held, queries = (self.held, self.queries) if self._saved is None else self._saved
        tensors = [*self.held.tensors(), *held.tensors(), *self.held.spare(), *held.spare()]
        for one in (self.queries, queries):
            tensors += one.tensors() if one is not None else []
        if self._part is not None:
            tensors += [x for x in (self._part.columns, self._part.queries) if x is not None]
        return list({tensor.data_ptr() if tensor.numel() else id(tensor): tensor for tensor in tensors}.values())

    # ---- the parts of it

    def _hold(self, held: Kept) -> None:
        """A row changed while others are pending: a discard may no longer go back to the arrays before the step."""
        self.held, self._saved = held, None

    def _as_rings(self, step: Step) -> bool:
        """Whether a step sees all that is filled: what is out of a token's sight is evicted before it comes."""
        return self._sees_all or step.width == 1

    def _make_room(self, width: int) -> None:
        """Have `width` slots behind the filled ones, and not many more; the arrays are replaced, never written.

        What was evicted lately goes back to where it lay, and its scores are still there: these slots stay.
        """
        need, slots = max(self.held.most) + width, self.held.slots
        size = max(need, min(2 * need, self.policy.most + width + ROOM))
        least = max(size, *(row.slots for row in self.held.ledger.rows))
        if need > slots:
            self.held = self.held.resized(size)
        elif slots > least + least // 8 + 2 * ROOM:
            self.held = self.held.resized(least)

    def _enter(self, step: Step) -> Part:
        """Have a part of the step before it done with, and room for this one."""
        part = self._part
        if part is not None and part.step is step:
            return part
        if part is not None:
            self._settle(part.step.counts)()
            self._make_room(step.width)
        part = self._part = Part(step, numbers(step, self.held.most))
        if (spare := self.held.change) is not None and step.width == 1:
            part.columns, part.queries = spare.columns, spare.queries
            return part
        if self.history:
            planes = step.width if self._tentative else min(step.width, self.history)
            shape = (*self.held.lists.live.shape, planes, self.held.slots)
            part.columns = torch.empty(shape, dtype=torch.float32, device=self.layout.device)
        part.queries = None if self.queries is None else self.queries.room(step.width)
        return part

    def _leave(self) -> None:
        """Be done with the part; what it reads with serves again if its buffers do."""
        held, self._part = self.held, None
        rings, change = held.rings, held.change
        if rings is not None:
            rings.starts = None
            if change is None or rings.columns is not change.columns or rings.queries is not change.queries:
                held.rings = None

    def _store(self, new: tuple[Tensor, Tensor], step: Step) -> None:
        """Put keys and values `[R, T, K, D]` behind the filled slots."""
        live, arrays = self.held.lists.live, self.arrays
        coded = self.codec.encode(*new)
        if self.held.ledger.even and self.codec.bits is None:
            assert self._part is not None
            ops.append(coded["k"], coded["v"], arrays["k"], arrays["v"], self._part.starts, step.counts_t)
            return
        for r, count in enumerate(step.counts):
            for h, first in enumerate(live[r].tolist()):
                for name, stored in coded.items():
                    arrays[name][r, h, first : first + count] = stored[r, :count, h].to(arrays[name])

    def _attend_codes(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        rotation: ops.Rotation | None,
        part: Part,
        scoring: ops.Scoring,
        columns: Columns | None,
    ) -> Tensor:
        bits, arrays = self.codec.bits, self.arrays
        assert bits is not None
        return attend_quantized(
            q, new, rotation, held(arrays), None, part.starts, part.step.counts_t, scoring, bits=bits, columns=columns
        )

    def _settle(self, accepted: tuple[int, ...]) -> Install:
        """Make the first accepted tokens of the part real, and evict: prepared, and done by what comes back."""
        part, held = self._part, self.held
        assert part is not None
        step = part.step
        evicted, wanted, after = self.judge.verdict(self, part, accepted)
        if wanted > held.graves or held.graves > 2 * wanted + 4 * ROOM:
            held = held.reburied(wanted + ROOM if wanted else 0)
        ring = None if self.queries is None else self.queries.made()
        change = held.change
        if change is None or not change.like(held.lists, part.columns, evicted, part.queries, ring):
            change = Change(held.lists, part.columns, evicted, part.queries, ring)
        settling = step.memo(("settling", accepted), lambda: _settling(step, accepted))
        settling.add(self, change)

        def install() -> None:
            settling.run()
            held.ledger = after
            if isinstance(evicted, Tensor) and not (after.even and self.judge.foresees):
                held.count()
            if self.queries is not None:
                for row, (start, n) in enumerate(zip(step.starts, accepted)):
                    if n:
                        self.queries.wrote(row, start, start + n)
            held.change = change if step.width == 1 and not isinstance(evicted, Tensor) else None
            self.held = held
            self._leave()

        return install

    def turn(self, x: Tensor, delta: int) -> Tensor:
        return x if self.shift is None else self.shift(x, delta)

    def read(self, arrays: Arrays) -> tuple[Tensor, Tensor]:
        k, v = self.codec.decode(arrays)
        return self.codec.turn(k.float()), self.codec.turn(v.float())


def _settling(step: Step, accepted: tuple[int, ...]) -> Settling:
    return Settling(step.starts_t, step.counts_t, numbers(step, accepted))
