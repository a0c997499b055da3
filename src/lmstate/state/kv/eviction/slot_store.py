"""The slots of an evicting layer: filled from the front of each head, and an undo log of the last evictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from lmstate.errors import SnapshotError
from lmstate.ops import KVView
from lmstate.ops.attention.slots import evict, undo_evictions
from lmstate.ops.types.slot_table import SlotCommit, SlotTable

Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class RowOccupancy:
    """Counts of a row's slots on the host, so that a step need not wait for the device."""

    most: int = 0  # the filled slots of its fullest head
    floor: int = 0  # a rewind to here or later finds all that was evicted since
    evictions: tuple[tuple[int, int], ...] = ()
    """Times of a row's evictions, and slots of the head that lost most: as far back as a rewind may want them."""

    @property
    def undoable(self) -> int:
        return sum(count for _, count in self.evictions)

    @property
    def slots(self) -> int:
        """As many as its fullest head has filled at any length that a rewind may want, or more."""
        return self.most + self.undoable

    def after_step(self, added: int, lost: int, length: int, rewind: int, *, exact: bool) -> RowOccupancy:
        """The row added slots and lost some. `exact`: something else of it reaches no farther back than a rewind."""
        horizon = length - rewind
        evictions = (*self.evictions, (length, lost)) if lost else self.evictions
        floor = max([self.floor, horizon if exact else 0, *(at for at, _ in evictions if at <= horizon)])
        return RowOccupancy(self.most + added - lost, floor, tuple(one for one in evictions if one[0] > horizon))


@dataclass(frozen=True, eq=False)
class Occupancy:
    """The counts of every row. Never changed: layers that fare alike share one, and what a step makes of it."""

    rows: tuple[RowOccupancy, ...]
    uniform: bool = True  # whether every head of a row has as many slots as its fullest one

    @cached_property
    def most(self) -> tuple[int, ...]:
        """Of each row."""
        return tuple(row.most for row in self.rows)

    def set(self, row: int, one: RowOccupancy) -> Occupancy:
        return Occupancy((*self.rows[:row], one, *self.rows[row + 1 :]), self.uniform)


@dataclass
class SlotStore:
    """Slots and undo log on the device (`SlotTable`), and their `occupancy` as the host knows it."""

    table: SlotTable
    occupancy: Occupancy
    slot_commit: SlotCommit | None = field(default=None, init=False)
    """The last step's commit, if a next one of a token may make the same: its buffers serve again."""
    view: KVView | None = field(default=None, init=False)  # with those buffers

    @classmethod
    def empty(
        cls, rows: int, heads: int, parts: Mapping[str, tuple[int, torch.dtype]], history: int, device: torch.device
    ) -> SlotStore:
        """No slots yet. `parts`: width and dtype of what is stored; `history`: for how many lengths scores are."""
        arrays = {
            name: torch.zeros(rows, heads, 0, w, dtype=dtype, device=device) for name, (w, dtype) in parts.items()
        }
        arrays["position"] = torch.zeros(rows, heads, 0, dtype=torch.int32, device=device)
        none = torch.zeros(rows, heads, dtype=torch.int64, device=device)
        undo_log = {**arrays, "evicted_at": arrays["position"], "slot": arrays["position"]}
        if history:
            arrays["scores"] = torch.zeros(rows, heads, history, 0, dtype=torch.float32, device=device)
        table = SlotTable(arrays, undo_log, none, none.clone())
        return cls(table, Occupancy((RowOccupancy(),) * rows))

    @property
    def most(self) -> tuple[int, ...]:
        """Of each row: the filled slots of its fullest head."""
        return self.occupancy.most

    @property
    def slots(self) -> int:
        """S."""
        return self.table.slots

    @property
    def undo_slots(self) -> int:
        """G."""
        return self.table.undo_slots

    def clone(self) -> SlotStore:
        """The same in tensors of its own, which no gradient follows."""
        return SlotStore(self._each(lambda x: x.detach().clone()), self.occupancy)

    def _each(self, change: Callable[[Tensor], Tensor]) -> SlotTable:
        table = self.table
        stored, undo_log = ({name: change(x) for name, x in part.items()} for part in (table.stored, table.undo_log))
        return SlotTable(stored, undo_log, change(table.filled), change(table.undo_head))

    def selected(self, rows: Sequence[int | None]) -> SlotStore:
        source = torch.tensor([0 if row is None else row for row in rows], device=self.table.filled.device)
        table = self._each(lambda x: x[source])
        occupancies = tuple(RowOccupancy() if row is None else self.occupancy.rows[row] for row in rows)
        chosen = SlotStore(table, Occupancy(occupancies, self.occupancy.uniform))
        for i, row in enumerate(rows):
            if row is None:
                chosen.empty_row(i)
        return chosen

    def empty_row(self, row: int) -> None:
        self.table.filled[row], self.table.undo_head[row], self.table.undo_log["evicted_at"][row] = 0, 0, 0
        self.occupancy = self.occupancy.set(row, RowOccupancy())

    def count(self) -> None:
        """Read from the device how many slots the heads have filled."""
        filled = self.table.filled.tolist()
        most = [max(row, default=0) for row in filled]
        uniform = all(min(row, default=0) == n for row, n in zip(filled, most))
        self.occupancy = Occupancy(tuple(replace(row, most=n) for row, n in zip(self.occupancy.rows, most)), uniform)

    def reaches(self, row: int, floor: int) -> None:
        """No rewind of the row goes back before `floor`."""
        self.occupancy = self.occupancy.set(row, replace(self.occupancy.rows[row], floor=floor))

    # ---- room

    def resized(self, slots: int) -> SlotStore:
        """The same with another capacity, which holds all that is filled; the slots are copies, the rest is shared."""
        return replace(self, table=replace(self.table, stored=_sized(self.table.stored, slots)))

    def with_undo_slots(self, undo_slots: int) -> SlotStore:
        """The same with room for the last `undo_slots` evictions; the undo log is a copy, the rest is shared."""
        count = min(self.undo_slots, undo_slots)
        newest = torch.arange(-count, 0, device=self.table.undo_head.device) + self.table.undo_head[..., None]
        undo_log = _sized(gathered(self.table.undo_log, newest % max(self.undo_slots, 1)), undo_slots)
        undo_head = torch.full_like(self.table.undo_head, count)
        return replace(self, table=replace(self.table, undo_log=undo_log, undo_head=undo_head))

    # ---- a row

    def filled(self) -> Tensor:
        """bool `[R, K, S]`"""
        return torch.arange(self.slots, device=self.table.filled.device) < self.table.filled[..., None]

    def with_new(self, starts: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Positions int32 `[R, K, S]` with each row's first `counts` new tokens, and which slots are filled then."""
        first, more = (torch.tensor(n, device=self.table.filled.device)[:, None, None] for n in (starts, counts))
        behind = torch.arange(self.slots, device=self.table.filled.device) - self.table.filled[..., None]
        positions = torch.where(behind >= 0, first + behind, self.table.stored["position"])
        return positions.int(), behind < more

    def put(self, row: int, arrays: Arrays, there: Tensor) -> None:
        """Fill a row's slots with those of `arrays` `[1, K, n]` that are `there`, in their order; there is room."""
        order = (~there).int().argsort(dim=-1, stable=True)[..., : int(there.sum(-1).max())]
        for name, array in gathered({name: arrays[name] for name in self.table.stored}, order).items():
            self.table.stored[name][row].narrow(_axis(name) - 1, 0, order.shape[2]).copy_(array[0])
        self.table.filled[row] = there[0].sum(-1)

    def rewind(self, to: int) -> None:
        """Take every row back to length `to`, which its undo log reaches. In place."""
        undo_evictions(self.table, to)
        rows = (
            replace(row, evictions=tuple(one for one in row.evictions if one[0] <= to)) for row in self.occupancy.rows
        )
        self.occupancy = replace(self.occupancy, rows=tuple(rows))
        self.count()

    def evict(self, gone: Tensor, length: int, count: int) -> None:
        """Evict slots, bool `[R, K, S]`, up to `count` of a head, at a length of every row. In place."""
        for r, h in product(*map(range, gone.shape[:2])):
            evict(self.table, r, h, gone[r, h], length)
        if count:
            rows = (replace(row, evictions=(*row.evictions, (length, count))) for row in self.occupancy.rows)
            self.occupancy = replace(self.occupancy, rows=tuple(rows))
        self.count()

    def with_row(self, row: int, other: SlotStore) -> SlotStore:
        """A copy whose row is the only one of `other`, which has as many slots and undo slots."""
        if len(self.occupancy.rows) == 1:
            return other
        whole = self.clone()
        for mine, theirs in zip(whole.tensors(), other.tensors()):
            mine[row] = theirs[0]
        whole.occupancy = self.occupancy.set(row, other.occupancy.rows[0])
        whole.count()
        return whole

    def captured(self, row: int, length: int) -> Arrays:
        """Copies of a row's slots without a row axis; -1 and zeros where a head has fewer than others.

        In the order in which they are, since that is the order in which attention sums over them.
        """
        absent, arrays = ~self.filled()[row, :, : self.most[row]], {}
        for name, stored in self.table.stored.items():
            own = stored[row, :, length % stored.shape[2]] if name == "scores" else stored[row]  # [K, S, ..]
            own = own[:, : self.most[row]]
            hidden = absent[..., None] if own.ndim == 3 else absent
            arrays[name] = own.masked_fill(hidden, -1 if name == "position" else 0)
        return arrays

    def restorable(self, length: int, tensors: Mapping[str, Tensor]) -> Arrays:
        """The output of `captured` as `put` takes it. Raises `SnapshotError` if it cannot be of a row of `length`."""
        own = self.table.stored
        position = check(own, length, tensors)
        count, stored = position.shape[-1], {}
        for name, array in own.items():
            given = tensors[name][None].to(array)
            stored[name] = given[:, :, None].expand(-1, -1, array.shape[2], count) if name == "scores" else given
        return stored

    def tensors(self) -> list[Tensor]:
        return [*self.table.stored.values(), *self.table.undo_log.values(), self.table.filled, self.table.undo_head]

    def spare(self) -> list[Tensor]:
        """Buffers that a next step may use."""
        return (
            []
            if self.slot_commit is None
            else [x for x in (self.slot_commit.columns, self.slot_commit.queries) if x is not None]
        )


def check(stored: Arrays, length: int, tensors: Mapping[str, Tensor]) -> Tensor:
    """The positions of the slots of a snapshot. Raises `SnapshotError` where no row would have captured them."""
    if set(tensors) != set(stored):
        raise SnapshotError(
            f"this layer evicts, and needs the tensors {sorted(stored)}; the snapshot has {sorted(tensors)}: "
            "restore it in a state that was made with the same kv policy"
        )
    position = tensors["position"]
    count = position.shape[-1:].numel()
    for name in sorted(tensors, key=lambda name: name != "position"):  # first, as it tells how many slots there are
        own, tensor = stored[name], tensors[name]
        shape = [own.shape[1], count, *([own.shape[-1]] if own.ndim == 4 and name != "scores" else [])]
        if list(tensor.shape) != shape or tensor.is_floating_point() != own.is_floating_point():
            raise SnapshotError(
                f"the snapshot's {name} is {tensor.dtype} {list(tensor.shape)}; this layer holds {own.dtype} {shape}"
            )
        if not own.is_floating_point() and tensor.dtype != own.dtype:
            raise SnapshotError(f"the snapshot's {name} is {tensor.dtype}; this layer holds {own.dtype}")
    if position.numel() and not -1 <= int(position.min()) <= int(position.max()) < length:
        raise SnapshotError(f"the snapshot's positions leave the row of {length} tokens")
    there, ordered = position >= 0, position.sort(dim=-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any() or (there[:, 1:] & ~there[:, :-1]).any() or not there.any(0).all():
        raise SnapshotError(
            "the snapshot's positions are not all different in every head, or not from its first slot on, to the last "
            "slot of the fullest one"
        )
    if "scores" in tensors and tensors["scores"].signbit().any():
        raise SnapshotError("the snapshot's scores are sums of attention, and some are negative")
    return position


def gathered(arrays: Arrays, order: Tensor) -> Arrays:
    """Copies of the slots `order` int64 `[R, K, n]`, in that order."""
    out = {}
    for name, array in arrays.items():
        if array.ndim == 3:
            out[name] = array.gather(-1, order)
        elif _axis(name) == 3:
            out[name] = array.gather(-1, order[:, :, None].expand(-1, -1, array.shape[2], -1))
        else:
            out[name] = array.gather(2, order[..., None].expand(-1, -1, -1, array.shape[3]))
    return out


def _axis(name: str) -> int:
    """Axis of an array's slots, counting the row axis."""
    return 3 if name == "scores" else 2


def _sized(arrays: Arrays, slots: int) -> Arrays:
    """Copies with `slots` slots: the first ones of `arrays`, then zeros."""
    out = {}
    for name, array in arrays.items():
        axis = _axis(name)
        shape = list(array.shape)
        shape[axis], count = slots, min(slots, shape[axis])
        out[name] = array.new_zeros(shape)
        out[name].narrow(axis, 0, count).copy_(array.narrow(axis, 0, count))
    return out
