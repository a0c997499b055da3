"""What an evicting layer keeps: lists of slots that are filled from the front, and what was evicted lately."""

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
from lmstate.ops.types.slot_table import NONE, SlotCommit, SlotTable

Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class RowOccupancy:
    """What the host knows of a row's lists, so that it need not ask."""

    most: int = 0  # the filled slots of its fullest head
    floor: int = 0  # a rewind to here or later finds all that was evicted since
    evictions: tuple[tuple[int, int], ...] = ()
    """When it evicted, and how many slots of the head that lost most: as far back as a rewind may want them."""

    @property
    def undoable(self) -> int:
        return sum(count for _, count in self.evictions)

    @property
    def slots(self) -> int:
        """As many as its fullest head has filled at any length that a rewind may want, or more."""
        return self.most + self.undoable

    def settled(self, added: int, lost: int, length: int, rewind: int, *, exact: bool) -> RowOccupancy:
        """The row added slots and lost some. `exact`: something else of it reaches no farther back than a rewind."""
        horizon = length - rewind
        evictions = (*self.evictions, (length, lost)) if lost else self.evictions
        floor = max([self.floor, horizon if exact else 0, *(at for at, _ in evictions if at <= horizon)])
        return RowOccupancy(self.most + added - lost, floor, tuple(one for one in evictions if one[0] > horizon))


@dataclass(frozen=True, eq=False)
class Occupancy:
    """The accounts of every row. Never changed: layers that fare alike share one, and what a step makes of it."""

    rows: tuple[RowOccupancy, ...]
    even: bool = True  # whether every head of a row has as many slots as its fullest one

    @cached_property
    def most(self) -> tuple[int, ...]:
        """Of each row."""
        return tuple(row.most for row in self.rows)

    def set(self, row: int, account: RowOccupancy) -> Occupancy:
        return Occupancy((*self.rows[:row], account, *self.rows[row + 1 :]), self.even)


@dataclass
class SlotStore:
    """`lists` says what lies where (`ops.commit_slots.SlotTable`), and `ledger` what the host knows of it."""

    lists: SlotTable
    ledger: Occupancy
    change: SlotCommit | None = field(default=None, init=False)
    """What the last step did to the lists, if a next one of a token may do the same: its buffers serve again."""
    rings: KVView | None = field(default=None, init=False)  # with those buffers

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
        lists = SlotTable(arrays, undo_log, none, none.clone())
        return cls(lists, Occupancy((RowOccupancy(),) * rows))

    @property
    def most(self) -> tuple[int, ...]:
        """Of each row: the filled slots of its fullest head."""
        return self.ledger.most

    @property
    def slots(self) -> int:
        """S."""
        return self.lists.slots

    @property
    def undo_slots(self) -> int:
        """G."""
        return self.lists.undo_slots

    def clone(self) -> SlotStore:
        kept, undo_log, filled, undo_head = (
            self.lists.stored,
            self.lists.undo_log,
            self.lists.filled,
            self.lists.undo_head,
        )
        lists = SlotTable(_each(kept, Tensor.clone), _each(undo_log, Tensor.clone), filled.clone(), undo_head.clone())
        return SlotStore(lists, self.ledger)

    def selected(self, rows: Sequence[int | None]) -> SlotStore:
        source = torch.tensor([0 if row is None else row for row in rows], device=self.lists.filled.device)
        kept, undo_log, filled, undo_head = (
            self.lists.stored,
            self.lists.undo_log,
            self.lists.filled,
            self.lists.undo_head,
        )
        lists = SlotTable(
            _each(kept, lambda x: x[source]), _each(undo_log, lambda x: x[source]), filled[source], undo_head[source]
        )
        accounts = tuple(RowOccupancy() if row is None else self.ledger.rows[row] for row in rows)
        chosen = SlotStore(lists, Occupancy(accounts, self.ledger.even))
        for i, row in enumerate(rows):
            if row is None:
                chosen.empty_row(i)
        return chosen

    def empty_row(self, row: int) -> None:
        self.lists.filled[row], self.lists.undo_head[row], self.lists.undo_log["evicted_at"][row] = 0, 0, 0
        self.ledger = self.ledger.set(row, RowOccupancy())

    def count(self) -> None:
        """Ask how many slots the heads have filled, where what was evicted does not say."""
        filled = self.lists.filled.tolist()
        most = [max(row, default=0) for row in filled]
        even = all(min(row, default=0) == n for row, n in zip(filled, most))
        self.ledger = Occupancy(tuple(replace(row, most=n) for row, n in zip(self.ledger.rows, most)), even)

    def reaches(self, row: int, floor: int) -> None:
        """No rewind of the row goes back before `floor`."""
        self.ledger = self.ledger.set(row, replace(self.ledger.rows[row], floor=floor))

    # ---- room

    def resized(self, slots: int) -> SlotStore:
        """The same with another number of slots, which holds what is filled and more; the arrays are copies."""
        return replace(self, lists=replace(self.lists, stored=_sized(self.lists.stored, slots)))

    def reburied(self, undo_slots: int) -> SlotStore:
        """The same with another number of graves, for those that were evicted last; the arrays are copies."""
        count = min(self.undo_slots, undo_slots)
        newest = torch.arange(-count, 0, device=self.lists.undo_head.device) + self.lists.undo_head[..., None]
        undo_log = _sized(taken(self.lists.undo_log, newest % max(self.undo_slots, 1)), undo_slots)
        undo_head = torch.full_like(self.lists.undo_head, count)
        return replace(self, lists=replace(self.lists, undo_log=undo_log, undo_head=undo_head))

    # ---- a row

    def filled(self) -> Tensor:
        """bool `[R, K, S]`"""
        return torch.arange(self.slots, device=self.lists.filled.device) < self.lists.filled[..., None]

    def with_new(self, starts: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Positions int32 `[R, K, S]` with each row's first `counts` new tokens, and which slots are filled then."""
        first, more = (torch.tensor(n, device=self.lists.filled.device)[:, None, None] for n in (starts, counts))
        behind = torch.arange(self.slots, device=self.lists.filled.device) - self.lists.filled[..., None]
        positions = torch.where(behind >= 0, first + behind, self.lists.stored["position"])
        return positions.int(), behind < more

    def put(self, row: int, arrays: Arrays, there: Tensor) -> None:
        """Fill a row's slots with those of `arrays` `[1, K, n]` that are `there`, by position; there is room."""
        order = torch.where(there, arrays["position"], NONE).argsort(dim=-1)[..., : int(there.sum(-1).max())]
        for name, array in taken({name: arrays[name] for name in self.lists.stored}, order).items():
            self.lists.stored[name][row].narrow(_axis(name) - 1, 0, order.shape[2]).copy_(array[0])
        self.lists.filled[row] = there[0].sum(-1)

    def went_back(self, to: int) -> None:
        """Take every row back to length `to`, which its graves reach."""
        undo_evictions(self.lists, to)
        rows = (replace(row, evictions=tuple(one for one in row.evictions if one[0] <= to)) for row in self.ledger.rows)
        self.ledger = replace(self.ledger, rows=tuple(rows))
        self.count()

    def evict(self, gone: Tensor, length: int, count: int) -> None:
        """Evict slots, bool `[R, K, S]`, up to `count` of a head, at a length of every row."""
        for r, h in product(*map(range, gone.shape[:2])):
            evict(self.lists, r, h, gone[r, h], length)
        if count:
            rows = (replace(row, evictions=(*row.evictions, (length, count))) for row in self.ledger.rows)
            self.ledger = replace(self.ledger, rows=tuple(rows))
        self.count()

    def assign(self, row: int, other: SlotStore) -> None:
        """Make a row what the only row of `other` is, whose slots and graves are as many."""
        for mine, theirs in zip(self.tensors(), other.tensors()):
            mine[row] = theirs[0]
        self.ledger = self.ledger.set(row, other.ledger.rows[0])

    def captured(self, row: int, length: int) -> Arrays:
        """Copies of a row's slots, by position, without a row axis; -1 and zeros where a head has fewer than others."""
        kept = {name: x[row : row + 1] for name, x in self.lists.stored.items()}
        there = self.filled()[row : row + 1]
        order = torch.where(there, kept["position"], NONE).argsort(dim=-1)[..., : self.most[row]]
        absent = ~there.gather(-1, order)
        arrays = taken(kept, order)
        arrays["position"].masked_fill_(absent, -1)
        if "scores" in arrays:
            arrays["scores"] = arrays["scores"][:, :, length % arrays["scores"].shape[2]].masked_fill(absent, 0)
        for array in (x for x in arrays.values() if x.ndim == 4):
            array.masked_fill_(absent[..., None], 0)
        return {name: x[0].clone() for name, x in arrays.items()}

    def restorable(self, length: int, tensors: Arrays) -> Arrays:
        """What `captured` gave, as `put` takes it. Raises `SnapshotError` if it cannot be of a row of `length`."""
        kept = self.lists.stored
        position = check(kept, length, tensors)
        count, stored = position.shape[-1], {}
        for name, array in kept.items():
            given = tensors[name][None].to(array)
            stored[name] = given[:, :, None].expand(-1, -1, array.shape[2], count) if name == "scores" else given
        return stored

    def tensors(self) -> list[Tensor]:
        return [*self.lists.stored.values(), *self.lists.undo_log.values(), self.lists.filled, self.lists.undo_head]

    def spare(self) -> list[Tensor]:
        """What a next step may use."""
        return [] if self.change is None else [x for x in (self.change.columns, self.change.queries) if x is not None]


def check(kept: Arrays, length: int, tensors: Arrays) -> Tensor:
    """The positions of what a row is restored from. Raises `SnapshotError` where it would not have captured that."""
    if set(tensors) != set(kept):
        raise SnapshotError(
            f"this layer evicts, and needs the tensors {sorted(kept)}; the snapshot has {sorted(tensors)}: restore it "
            f"in a state that was made with the same kv policy"
        )
    position = tensors["position"]
    count = position.shape[-1:].numel()
    for name in sorted(tensors, key=lambda name: name != "position"):  # first, as it tells how many slots there are
        own, tensor = kept[name], tensors[name]
        shape = [own.shape[1], count, *([own.shape[-1]] if own.ndim == 4 and name != "scores" else [])]
        if list(tensor.shape) != shape or tensor.is_floating_point() != own.is_floating_point():
            raise SnapshotError(
                f"the snapshot's {name} is {tensor.dtype} {list(tensor.shape)}; this layer holds {own.dtype} {shape}"
            )
        if not own.is_floating_point() and tensor.dtype != own.dtype:
            raise SnapshotError(f"the snapshot's {name} is {tensor.dtype}; this layer holds {own.dtype}")
    if position.numel() and not -1 <= int(position.min()) <= int(position.max()) < length:
        raise SnapshotError(f"the snapshot's positions leave the row of {length} tokens")
    there = position >= 0
    rises = there[:, :-1] & (position[:, 1:] > position[:, :-1])
    if not (rises | ~there[:, 1:]).all() or not there.any(0).all():
        raise SnapshotError("the snapshot's positions do not rise in every head, to the last slot of the fullest one")
    if "scores" in tensors and tensors["scores"].signbit().any():
        raise SnapshotError("the snapshot's scores are sums of attention, and some are negative")
    return position


def taken(arrays: Arrays, order: Tensor) -> Arrays:
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
    """Where an array's slots are, with a row axis."""
    return 3 if name == "scores" else 2


def _sized(arrays: Arrays, slots: int) -> Arrays:
    """Copies with so many slots, the first ones of `arrays` and then zeros."""
    out = {}
    for name, array in arrays.items():
        axis = _axis(name)
        shape = list(array.shape)
        shape[axis], count = slots, min(slots, shape[axis])
        out[name] = array.new_zeros(shape)
        out[name].narrow(axis, 0, count).copy_(array.narrow(axis, 0, count))
    return out


def _each(arrays: Arrays, change: Callable[[Tensor], Tensor]) -> Arrays:
    return {name: change(array) for name, array in arrays.items()}
