"""States over several ranks: whatever happens to that of rank 0 happens to those of the others.

A state is driven by integers, so the others get its calls and not its tensors. Rank 0 first does what it was asked for;
where that is refused, the others never hear of it. Tensors move in forwards and snapshots alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from lmstate.distributed.ranks import Collectives, Ranks
from lmstate.errors import SnapshotError, UnsupportedError
from lmstate.state import Snapshot, State, Step
from lmstate.state.media import Media
from lmstate.state.snapshot import differences
from lmstate.state.tree import PendingTree

Captured = Mapping[str, Tensor]


class Link:
    """The name of a state on the other ranks; none for one that only exists inside a call that they make themselves."""

    def __init__(self, ranks: Ranks, heads: Sequence[tuple[int, ...]], number: int | None) -> None:
        """`heads`: for each layer the kv heads of every rank; empty for one that is the same on all."""
        self.ranks, self.heads, self.number = ranks, tuple(heads), number
        if number is not None:
            weakref.finalize(self, ranks.freed.append, number).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        """Itself: the state that is copied gives the copy a link of its own."""
        return self


class MirroredState(State):
    """The state of rank 0. Made by `new_state` of a model over several ranks."""

    link: Link

    @contextmanager
    def _mirrored(self, verb: str, *arguments: Any) -> Iterator[None]:
        """Do inside what a method of `State` does, and have the others call it too, unless it was refused."""
        with self.link.ranks.turn() as outermost:
            yield
            if outermost:
                self.link.ranks.tell("call", self.link.number, verb, arguments)

    # ---- a step

    def backlog(self, counts: Sequence[int], *, logits: bool) -> list[list[int]]:
        with self._mirrored("backlog", counts, logits):
            return super().backlog(counts, logits=logits)

    def plan_backlog(self, ids: list[list[int]], counts: Sequence[int]) -> Step:
        with self._mirrored("plan_backlog", ids, counts):
            return super().plan_backlog(ids, counts)

    def commit_backlog(self, last: Tensor | None) -> None:
        with self._mirrored("commit_backlog", last is not None):
            super().commit_backlog(last)

    def plan(self, ids: Sequence[Sequence[int]], *, speculative: bool = False, rewindable: Sequence[bool] = ()) -> Step:
        with self._mirrored("plan", ids, speculative, rewindable):
            return super().plan(ids, speculative=speculative, rewindable=rewindable)

    def record_logits(self, logits: Tensor | None, kept: Sequence[int] | None = None) -> None:
        with self._mirrored("record_logits", None if logits is None else logits.ndim, kept):
            super().record_logits(logits, kept)

    def record_tree(self, tree: PendingTree[State]) -> None:
        assert isinstance(tree.state, MirroredState)
        with self.link.ranks.turn():
            super().record_tree(tree)
            branches = [(branch.row, branch.nodes) for branch in tree.branches]
            self.link.ranks.tell(
                "tree", self.link.number, tree.state.link.number, tree.counts, tree.parents, branches
            )  # fmt: skip

    # ---- the verdict, and moving about

    def commit(self, counts: int | Sequence[int] | None = None) -> None:
        counts = _listed(counts)
        with self._mirrored("commit", counts):
            super().commit(counts)

    def commit_path(self, paths: Sequence[Sequence[int]]) -> None:
        paths = [list(path) for path in paths]
        with self._mirrored("commit_path", paths):
            super().commit_path(paths)

    def discard(self) -> None:
        if self.link.ranks.failure is not None:
            super().discard()
            return
        with self._mirrored("discard"):
            super().discard()

    def queue(self, row: int, ids: Sequence[int]) -> None:
        ids = _listed(ids)
        with self._mirrored("queue", row, ids):
            super().queue(row, ids)

    def expect(self, row: int, length: int) -> None:
        with self._mirrored("expect", row, length):
            super().expect(row, length)

    def rewind(self, row: int, to: int) -> None:
        with self._mirrored("rewind", row, to):
            super().rewind(row, to)

    def mark(self, row: int) -> None:
        with self._mirrored("mark", row):
            super().mark(row)

    def select(self, rows: Sequence[int | None]) -> None:
        rows = _listed(rows)
        with self._mirrored("select", rows):
            super().select(rows)

    def remove(self, row: int) -> None:
        with self._mirrored("remove", row):
            super().remove(row)

    def drop(self, row: int, start: int, stop: int) -> None:
        with self._mirrored("drop", row, start, stop):
            super().drop(row, start, stop)

    def place(self, row: int, at: int, media: Media) -> None:
        raise UnsupportedError("a model over several processes reads no pictures: load it without parallel")

    # ---- snapshots

    def snapshot(self, row: int = 0) -> Snapshot:
        """One row as a value, the same as of one process: the heads of all ranks are gathered."""
        ranks = self.link.ranks
        with ranks.turn() as outermost:
            own = super().snapshot(row)
            if not outermost or not own.cached:
                return own
            ranks.tell("snapshot", self.link.number, row)
            with ranks.together():
                return replace(own, layers=gathered(ranks.group, own.layers, self.link.heads))

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Put a snapshot of any number of processes in a row."""
        with self.link.ranks.turn():
            super().restore(row, self._own(snapshot))
            self._send(snapshot, "restore", row)

    def add(self, snapshot: Snapshot | None = None) -> int:
        with self.link.ranks.turn():
            row = super().add(None if snapshot is None else self._own(snapshot))
            self._send(snapshot, "add", row)
            return row

    def _own(self, snapshot: Snapshot) -> Snapshot:
        """The part of rank 0. Anything but a snapshot of this model goes on as it is: the method that gets it refuses
        it."""
        if not isinstance(snapshot, Snapshot) or differences(snapshot.fingerprint, self.fingerprint):
            return snapshot
        if snapshot.media:
            raise UnsupportedError("the snapshot has pictures, which a model over several processes does not read")
        if not isinstance(snapshot.layers, tuple | list) or len(snapshot.layers) != len(self.link.heads):
            return snapshot
        return replace(snapshot, layers=part_of(snapshot.layers, self.link.heads, 0))

    def _send(self, snapshot: Snapshot | None, verb: str, row: int) -> None:
        """Have the others put their parts of a snapshot, which rank 0 has restored, in a row."""
        ranks = self.link.ranks
        if snapshot is None:
            ranks.tell(verb, self.link.number, row, None)
            return
        tensors = [{name: layer[name] for name in sorted(layer)} for layer in snapshot.layers]
        shapes = [
            {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in layer.items()}
            for layer in tensors
        ]
        header = (list(snapshot.tokens), snapshot.cached, snapshot.frequency_key, snapshot.logits is not None, shapes)
        ranks.tell(verb, self.link.number, row, header)
        with ranks.together():
            for layer in tensors:
                for tensor in layer.values():
                    ranks.group.broadcast(tensor.detach().contiguous())

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        ranks = self.link.ranks
        with ranks.turn() as outermost:
            twin = super().__deepcopy__(memo)
            assert isinstance(twin, MirroredState)
            twin.link = Link(ranks, self.link.heads, next(ranks.ids) if outermost else None)
            if outermost:
                ranks.tell("copy", self.link.number, twin.link.number)
            return twin

    def device_step(self, width: int, counts: Tensor | None = None) -> NoReturn:
        raise UnsupportedError("a state over several processes takes no device steps")


def _listed(value: Any) -> Any:
    """Numbers as a list, which can be read twice; one number or None as it is."""
    single = not isinstance(value, Iterable) or (isinstance(value, Tensor) and value.ndim == 0)
    return value if single else list(value)


def gathered(group: Collectives, layers: Sequence[Captured], heads: Sequence[tuple[int, ...]]) -> tuple[Captured, ...]:
    """Captured layers with the heads of all ranks; every rank calls it."""
    whole: list[Captured] = []
    for layer, widths in zip(layers, heads, strict=True):
        if not widths:
            whole.append(layer)
            continue
        whole.append({name: group.gather(layer[name], widths, dim=0) for name in sorted(layer)})
    return tuple(whole)


def part_of(layers: Sequence[Captured], heads: Sequence[tuple[int, ...]], rank: int) -> tuple[Captured, ...]:
    """Captured layers with the heads of one rank. Raises `SnapshotError` for other heads than the model has."""
    own: list[Captured] = []
    for index, (layer, widths) in enumerate(zip(layers, heads, strict=True)):
        if not widths or not isinstance(layer, Mapping):
            own.append(layer)
            continue
        first, count = sum(widths[:rank]), widths[rank]
        parts = {}
        for name in layer:
            tensor = layer[name]
            if not isinstance(tensor, Tensor) or tensor.ndim < 1 or len(tensor) != sum(widths):
                raise SnapshotError(f"layer {index} of the snapshot has no {name} of {sum(widths)} heads")
            parts[name] = tensor[first : first + count].contiguous()
        own.append(parts)
    return tuple(own)


def received(
    group: Collectives, header: Sequence[Any], heads: Sequence[tuple[int, ...]], vocab: int, fingerprint: str
) -> Snapshot:
    """The part of this rank of a snapshot that rank 0 sends. Its logits are zeros: rank 0 alone has those."""
    tokens, cached, frequency_key, known, shapes = header
    layers = []
    for shape_of in shapes:
        layer = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in shape_of.items()}
        for tensor in layer.values():
            group.broadcast(tensor)
        layers.append(layer)
    logits = torch.zeros(vocab) if known else None
    own = part_of(layers, heads, group.rank)
    return Snapshot(tuple(tokens), cached, frequency_key, logits, own, fingerprint)
