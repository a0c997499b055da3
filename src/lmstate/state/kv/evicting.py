"""The state of an attention layer that forgets: which slots a policy keeps, in every kv head by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate import ops
from lmstate.ops.attend_slots import attend_slots
from lmstate.state.attention import KeyValueState
from lmstate.state.kv.arrays import NEVER, Arrays, alive_at, check, padded, taken_from
from lmstate.state.kv.codec import Codec
from lmstate.state.kv.policy import Evicting, Slots
from lmstate.state.kv.queries import LastQueries
from lmstate.state.layer import Install, Layout
from lmstate.state.step import Step

ROOM = 16  # slots to spare when the arrays are made anew


@dataclass
class Taken:
    """A part of the pending step that was stored, and what its queries saw."""

    step: Step
    slots: Tensor  # int64 [R, K, T]: where its tokens lie
    scores: Tensor | None = None  # float32 [R, K, S, n]: the slots' scores after each of the row's last n tokens
    queries: list[Tensor] = field(default_factory=list)  # of each row, float32 [n, H, D]: the last ones of its tokens

    def pad(self, slots: int) -> None:
        if self.scores is not None:
            self.scores = F.pad(self.scores, (0, 0, 0, slots - self.scores.shape[2]))


class EvictingState(KeyValueState):
    """Slots `[R, K, S]` in no order, each with the position it holds and the length of the row at which it was evicted.

    A slot is alive at length L if `position < L < died`, give or take the equality: so a rewind makes alive again what
    was evicted since, and a slot is free for new tokens only once no rewind inside the window can want it. New tokens
    go to free slots, and nothing is evicted before the commit, so that a discarded step leaves no trace. A certain step
    of several parts evicts between them, in copies.
    """

    forgets = True

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
    ):
        self.layout, self.policy, self.shift = layout, policy, shift
        self.sight = sight
        self.kind = "attention" if sight.reach is None else "window"
        self.codec = Codec(policy.storage, {"k": head_dim, "v": value_dim or head_dim}, layout.dtype)
        self.history = layout.rewind + 1 if policy.observes else 0  # lengths whose scores are kept, one in n % history
        self.arrays: Arrays = {
            name: torch.zeros(layout.rows, kv_heads, 0, width, dtype=dtype, device=layout.device)
            for name, (width, dtype) in self.codec.parts.items()
        }
        if self.history:
            self.arrays["scores"] = torch.zeros(
                layout.rows, kv_heads, 0, self.history, dtype=torch.float32, device=layout.device
            )
        for name in ("position", "died"):
            self.arrays[name] = torch.zeros(layout.rows, kv_heads, 0, dtype=torch.int32, device=layout.device)
        self.queries = LastQueries(policy.asks, layout) if policy.asks else None
        self.floor = [0] * layout.rows  # the earliest length that a rewind reaches
        self.scale = 1.0
        self._step: Step | None = None
        self._taken: list[Taken] = []
        self._saved: tuple[Arrays, LastQueries | None, list[int]] | None = None

    @property
    def slots(self) -> int:
        """S."""
        return self.arrays["position"].shape[2]

    # ---- the step

    def reserve(self, step: Step) -> None:
        self.discard()
        position = self.arrays["position"]
        # What a discarded step left behind; nothing committed is there.
        position.masked_fill_(position >= step.starts_t[:, None, None], -1)
        before = (self.arrays, self.queries, list(self.floor))
        self._step = step
        if not step.tentative and step.width > step.chunk:  # settles its parts one by one
            self.arrays = {name: array.clone() for name, array in self.arrays.items()}
            self.queries = None if self.queries is None else self.queries.clone()
        self._make_room(step.width if step.tentative else min(step.width, step.chunk))
        self._saved = before if self.arrays is not before[0] else None

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        scoring: ops.Scoring,
        rotation: ops.Rotation | None = None,
    ) -> Tensor:
        self.scale = scoring.scale
        if rotation is not None:
            q = ops.rope(q, *rotation)
            new = None if new is None else (ops.rope(new[0], *rotation), new[1])
        if new is not None:
            if self._taken and not step.tentative:
                self._settle(self._taken[-1].step.counts)()
                self._make_room(step.width)
            self._taken.append(self._store(*new, step))
        visible = torch.where(self.arrays["died"] == NEVER, self.arrays["position"], -1)
        last = (
            (step.width if step.tentative else min(step.width, self.history))
            if new is not None and self.history
            else None
        )
        seen, columns = attend_slots(
            self.codec.turn(q), *self.codec.decode(self.arrays), visible, step.starts_t, step.counts_t, scoring,
            self.sight, last,
        )  # fmt: skip
        if new is not None:
            self._note(q, columns, step)
        return self.codec.turn(seen)

    def commit(self, step: Step, accepted: tuple[int, ...]) -> Install | None:
        if not self._taken:
            return self.discard
        # The parts of a certain step are settled but for the last, and such a step is accepted whole.
        settle = self._settle(accepted if step.tentative else self._taken[-1].step.counts)

        def install() -> None:
            settle()
            self._step, self._saved = None, None

        return install

    def discard(self) -> None:
        if self._saved is not None:
            self.arrays, self.queries, self.floor = self._saved
        self._step, self._saved, self._taken = None, None, []

    # ---- moving about

    def reach(self, row: int, length: int) -> int:
        return min(self.floor[row], length)

    def rewind(self, row: int, length: int, to: int) -> Install | None:
        if to == length:
            return None
        one = {name: array[row : row + 1] for name, array in self.arrays.items()}
        position, died = one["position"], one["died"]
        position = torch.where(position >= to, -1, position)
        died = torch.where(died > to, NEVER, died)
        scores = one["scores"][..., to % self.history] if self.history else None
        # As if the row's last commit had ended here: a step that went farther evicted later.
        died = self._evicted({**one, "position": position, "died": died}, scores, [to], [row])

        def install() -> None:
            self.arrays["position"][row], self.arrays["died"][row] = position[0], died[0]
            self._keep_arrays()

        return install

    def select(self, rows: Sequence[int | None]) -> Install | None:
        source = torch.tensor([0 if row is None else row for row in rows], device=self.layout.device)
        arrays = {name: array[source] for name, array in self.arrays.items()}
        for row in (i for i, old in enumerate(rows) if old is None):
            arrays["position"][row] = -1
        queries = None if self.queries is None else self.queries.select(rows)
        floor = [0 if row is None else self.floor[row] for row in rows]

        def install() -> None:
            self.arrays, self.queries, self.floor = arrays, queries, floor

        return install

    def capture(self, row: int, length: int) -> dict[str, Tensor]:
        one = {name: array[row] for name, array in self.arrays.items()}
        alive = alive_at(one, torch.tensor(length, device=self.layout.device))
        count = int(alive.sum(-1).max()) if alive.numel() else 0
        order = torch.where(alive, one["position"], NEVER).argsort(dim=-1)[:, :count]  # [K, n], by position
        kept = taken_from(one, order)
        absent = ~alive.gather(-1, order)
        kept["position"].masked_fill_(absent, -1)
        del kept["died"]
        if self.history:
            kept["scores"] = kept["scores"][..., length % self.history].clone()
        if self.queries is not None:
            kept["queries"] = self.queries.held(row, length)
        for name in self.codec.parts:
            kept[name].masked_fill_(absent[..., None], 0)
        return kept

    def restore(self, row: int, length: int, tensors: dict[str, Tensor]) -> Install | None:
        stored = check(self.arrays, self.queries is not None, length, tensors) if tensors or length else {}
        count = stored["position"].shape[-1] if stored else 0
        arrays = self.arrays if count <= self.slots else padded(self.arrays, count - self.slots)
        fresh = {name: array.new_zeros(array.shape[1:]) for name, array in arrays.items()}
        fresh["position"].fill_(-1)
        fresh["died"].fill_(NEVER)
        for name, tensor in stored.items():
            if name == "scores":
                fresh[name][:, :count] = tensor[..., None].to(fresh[name])
            elif name != "queries":
                fresh[name][:, :count] = tensor.to(fresh[name])

        def install() -> None:
            for name, array in fresh.items():
                arrays[name][row] = array
            if arrays is not self.arrays:
                for taken in self._taken:
                    taken.pad(arrays["position"].shape[2])
                self.arrays = arrays
            self._keep_arrays()
            self.floor[row] = length
            if self.queries is not None:
                self.queries.clear(row, length)
                if "queries" in stored and len(stored["queries"]):
                    self.queries.low[row] = length - len(stored["queries"])
                    self.queries.put(row, length - len(stored["queries"]), stored["queries"])

        return install

    def kept(self, row: int, length: int) -> list[list[int]]:
        one = {name: self.arrays[name][row] for name in ("position", "died")}
        at = torch.tensor(length, device=self.layout.device)
        alive = alive_at(one, at) & ~self.sight.lost(one["position"], at)
        return [sorted(head[there].tolist()) for head, there in zip(one["position"], alive)]

    def refuses_drop(self, row: int) -> str | None:
        if self.codec.bits is not None:
            return "its keys are quantised as they were rotated, and never a second time"
        return None if self.sight.reach is None else "its window has forgotten earlier tokens"

    def drop(self, row: int, length: int, start: int, stop: int) -> Install | None:
        one = {name: array[row].clone() for name, array in self.arrays.items()}
        alive = alive_at(one, torch.tensor(length, device=self.layout.device))
        position = one["position"]
        later = alive & (position >= stop)
        position = torch.where(later, position - (stop - start), position)
        one["position"] = position.masked_fill(~alive | ~(later | (position < start)), -1)
        if self.shift is not None:
            turned = self.shift(one["k"], start - stop).to(one["k"])
            one["k"] = torch.where(later[..., None], turned, one["k"])
        if self.history:
            one["scores"] = one["scores"][..., length % self.history, None].expand_as(one["scores"])

        def install() -> None:
            for name, array in one.items():
                self.arrays[name][row] = array
            self.floor[row] = length - (stop - start)
            if self.queries is not None:
                self.queries.close(row, length, start, stop, self.shift or (lambda x, delta: x))

        return install

    def tensors(self) -> list[Tensor]:
        held = [*self.arrays.values(), *(self._saved[0].values() if self._saved else ())]
        for queries in (self.queries, self._saved[1] if self._saved else None):
            held += queries.tensors() if queries is not None else []
        for taken in self._taken:
            held += [taken.slots, *([] if taken.scores is None else [taken.scores]), *taken.queries]
        return list({id(tensor): tensor for tensor in held}.values())

    # ---- the parts of it

    def _free(self, step: Step) -> Tensor:
        """bool `[R, K, S]`: slots that hold nothing, or what no rewind inside the window brings back."""
        # A certain step of several parts will not be accepted in part: what counts is where it ends.
        settles = not step.tentative and step.width > step.chunk
        horizons = step.memo(
            ("horizons", self.layout.rewind),
            lambda: torch.tensor(step.ends if settles else step.starts, device=step.device) - self.layout.rewind,
        )
        return (self.arrays["position"] < 0) | (self.arrays["died"] <= horizons[:, None, None])

    def _make_room(self, width: int) -> None:
        """Have `width` free slots in every head, and not many more; the arrays are replaced, never written."""
        assert self._step is not None, "attend without reserve"
        free = self._free(self._step)
        used = self.slots - int(free.sum(-1).min()) if free.numel() else 0
        need = used + width
        size = max(need, min(2 * need, self.policy.most + self.layout.rewind + width + ROOM))
        if need > self.slots or self.slots > size + size // 8 + 2 * ROOM:
            order = free.to(torch.uint8).argsort(dim=-1, stable=True)[..., :size]
            lost = torch.where(free & (self.arrays["position"] >= 0), self.arrays["died"], 0)
            self._lose(lost)
            arrays = taken_from(self.arrays, order)
            arrays["position"].masked_fill_(free.gather(-1, order), -1)
            self.arrays = padded(arrays, size - order.shape[-1])

    def _store(self, k: Tensor, v: Tensor, step: Step) -> Taken:
        """Put a part's keys and values `[R, T, K, D]` into free slots."""
        assert self._step is not None
        slots = self._free(self._step).to(torch.uint8).topk(step.width, dim=-1).indices  # [R, K, T]
        arrays = self.arrays
        if any(self.floor) or step.starts != (0,) * step.rows:
            overwritten = arrays["position"].gather(-1, slots) >= 0
            self._lose(torch.where(overwritten, arrays["died"].gather(-1, slots), 0))
        heads = torch.arange(slots.shape[0] * slots.shape[1], device=slots.device).view(*slots.shape[:2], 1)
        where = slots + heads * self.slots  # [R, K, T]: a slot's number among those of all rows and heads
        for name, stored in self.codec.encode(k, v).items():
            arrays[name].view(-1, stored.shape[-1])[where] = stored.transpose(1, 2)  # [R, K, T, width]
        position = step.memo("slot positions", lambda: _positions(step))
        arrays["position"].view(-1)[where] = position[:, None]
        arrays["died"].view(-1)[where] = NEVER
        return Taken(step, slots)

    def _lose(self, died: Tensor) -> None:
        """Slots that were evicted at these lengths `[R, K, n]` are overwritten: no row can go back before them."""
        if died.numel():
            last = died.flatten(1).amax(1).tolist()
            self.floor = [max(floor, length) for floor, length in zip(self.floor, last)]

    def _note(self, q: Tensor, columns: Tensor | None, step: Step) -> None:
        """Keep of a part's attention what the commit will need of it."""
        taken = self._taken[-1]
        if columns is not None:
            earlier = self._taken[-2].scores if len(self._taken) > 1 else None
            if earlier is not None:
                before = earlier[..., -1]
            else:
                index = (step.starts_t % self.history).view(-1, 1, 1, 1).expand(*columns.shape[:3], 1)
                before = self.arrays["scores"].gather(-1, index)[..., 0]
                before = before.masked_fill(step.starts_t.view(-1, 1, 1) == 0, 0)
            before = before.scatter(2, taken.slots, 0)
            taken.scores = (before + columns[..., 0])[..., None] + columns[..., 1:].cumsum(-1)
        if self.queries is not None:
            most = step.width if step.tentative else self.queries.size
            taken.queries = [row[max(0, n - most) : n].clone() for row, n in zip(q.detach().float(), step.counts)]

    def _settle(self, accepted: Sequence[int]) -> Install:
        """Make the first accepted tokens of the parts taken real, and evict: prepared, and done by what comes back."""
        starts = self._taken[0].step.starts
        lengths = [start + n for start, n in zip(starts, accepted)]
        parts, offsets = [], [0] * len(starts)
        for taken in self._taken:
            counts = [min(max(n - o, 0), c) for n, o, c in zip(accepted, offsets, taken.step.counts)]
            offsets = [o + c for o, c in zip(offsets, taken.step.counts)]
            parts.append((taken, counts))
        queries = self.queries
        if queries is not None:
            queries = queries.clone()
            for taken, counts in parts:
                for row, (start, count, n) in enumerate(zip(taken.step.starts, taken.step.counts, counts)):
                    if n:
                        skipped = count - len(taken.queries[row])
                        queries.put(row, start + skipped, taken.queries[row][: n - skipped])
        writes: list[tuple[int, int, Tensor]] = []  # row, length, the scores [K, S] there
        for taken, counts in parts if self.history else []:
            assert taken.scores is not None
            for row, n in enumerate(counts):
                first = taken.step.counts[row] - taken.scores.shape[-1]  # the token that the first column comes after
                for token in range(max(first, n - self.history, 0), n):
                    length = taken.step.starts[row] + token + 1
                    writes.append((row, length, taken.scores[row, ..., token - first]))
        scores = None
        if self.history:
            latest = {row: column for row, _, column in writes}
            known = self.arrays["scores"]
            scores = torch.stack([
                latest[row] if row in latest else known[row, ..., length % self.history]
                for row, length in enumerate(lengths)
            ])  # fmt: skip
        moved = torch.tensor([n > 0 for n in accepted], device=self.layout.device)[:, None, None]
        died = self._evicted(self.arrays, scores, lengths, range(len(starts)), queries)
        died = torch.where(moved, died, self.arrays["died"])

        def install() -> None:
            self.arrays["died"], self.queries, self._taken = died, queries, []
            for row, length, column in writes:
                self.arrays["scores"][row, ..., length % self.history] = column
            if self.history or queries is not None:
                oldest = [length - self.layout.rewind if n else 0 for length, n in zip(lengths, accepted)]
                self.floor = [max(floor, length) for floor, length in zip(self.floor, oldest)]

        return install

    def _evicted(
        self,
        arrays: Arrays,
        scores: Tensor | None,
        lengths: Sequence[int],
        rows: Sequence[int],
        queries: LastQueries | None = None,
    ) -> Tensor:
        """`died` once the policy has had its say on these rows at these lengths."""
        at = torch.tensor(lengths, device=self.layout.device)[:, None, None]
        alive, position, died = alive_at(arrays, at), arrays["position"], arrays["died"]
        gone = torch.zeros_like(alive)
        if self.sight.reach is not None:
            gone = alive & self.sight.lost(position, at)
            alive = alive & ~gone
        if alive.numel() and int(alive.sum(-1).max()) > self.policy.most:
            queries = queries or self.queries
            asked = queries.before(rows, lengths) if queries is not None else (died.new_zeros(0), died.new_zeros(0))
            slots = Slots(
                position, alive, at, torch.zeros_like(position, dtype=torch.float32) if scores is None else scores,
                *asked, self.scale, lambda: self._read(arrays), self.shift or (lambda x, delta: x),
            )  # fmt: skip
            gone = gone | (self.policy.evict(slots) & alive)
        return torch.where(gone, at.to(died.dtype), died)

    def _read(self, arrays: Arrays) -> tuple[Tensor, Tensor]:
        k, v = self.codec.decode(arrays)
        return self.codec.turn(k.float()), self.codec.turn(v.float())

    def _keep_arrays(self) -> None:
        """A row changed while others are pending: a discard may no longer go back to the arrays before the step."""
        self._saved = None


def _positions(step: Step) -> Tensor:
    """int32 `[R, T]`, -1 at padding."""
    real = torch.arange(step.width, device=step.device) < step.counts_t[:, None]
    return torch.where(real, step.positions, -1).to(torch.int32)
