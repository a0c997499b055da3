"""States over several ranks: whatever happens to that of rank 0 happens to those of the others.

A state is driven by integers, so the others get its calls and not its tensors. Rank 0 first does what it was asked for;
where that is refused, the others never hear of it. Tensors move in forwards and snapshots alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any, NoReturn, Self

from torch import Tensor

from lmstate.distributed.blocks import RankBlocks
from lmstate.distributed.calls import CALLS, MirroredCall, listed
from lmstate.distributed.cuts import LayerCuts
from lmstate.distributed.ranks import Ranks
from lmstate.distributed.snapshots import Captured, gathered, in_hand, part_of, send, slot_states, told, told_source
from lmstate.errors import UnsupportedError
from lmstate.models.parts import ModelParts
from lmstate.state import Snapshot, State
from lmstate.state.blocks import CapturedBlocks, pieces_of
from lmstate.state.layers.slots import SlotState
from lmstate.state.media import Media
from lmstate.state.snapshot import differences
from lmstate.state.sources import Source, SourceFeatures
from lmstate.state.tree import PendingTree


class Link:
    """The name of a state on the other ranks; none for one that only exists inside a call that they make themselves."""

    def __init__(self, ranks: Ranks, cuts: LayerCuts, number: int | None) -> None:
        self.ranks, self.cuts, self.number = ranks, cuts, number
        if number is not None:
            weakref.finalize(self, ranks.freed.append, number).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        """Itself: the state that is copied gives the copy a link of its own."""
        return self


class MirroredState(State):
    """The state of rank 0. Made by `new_state` of a model over several ranks. It has the methods of `CALLS` besides."""

    link: Link

    def record_tree(self, tree: PendingTree[State]) -> None:
        assert isinstance(tree.state, MirroredState)
        with self.link.ranks.turn():
            super().record_tree(tree)
            branches = [(branch.row, branch.nodes) for branch in tree.branches]
            self.link.ranks.tell(
                "tree", self.link.number, tree.state.link.number, tree.counts, tree.parents, branches
            )  # fmt: skip

    # ---- sources

    def condition(self, row: int, source: Sequence[int] | SourceFeatures) -> None:
        with self.link.ranks.turn():
            super().condition(row, source)

    def _encoded(self, row: int, source: Source) -> Sequence[Mapping[str, Tensor]]:
        """As of one process, of the heads of rank 0. The others condition the row meanwhile, and encode with it."""
        ranks, model = self.link.ranks, self.user()
        assert isinstance(model, ModelParts) and model.encoder is not None
        model.encoder.check(source)
        ranks.tell("condition", self.link.number, row, told_source(source))
        with ranks.together():
            if isinstance(source, SourceFeatures) and source.values is not None:
                ranks.group.broadcast(source.values)
            return super()._encoded(row, source)

    def place(self, row: int, at: int, media: Media) -> None:
        raise UnsupportedError("a model over several processes reads no pictures: load it without parallel")

    # ---- snapshots

    def snapshot(self, row: int = 0) -> Snapshot:
        """One row as a value, the same as of one process. Its blocks stay where they are, on every rank."""
        ranks = self.link.ranks
        with ranks.turn() as outermost:
            own = super().snapshot(row)
            if not outermost or not any(map(len, own.layers)):
                return own
            ranks.tell("snapshot", self.link.number, row, self._numbered(own.layers))
            with ranks.together():
                layers = [
                    gathered(ranks.group, layer, cut, lambda own, cut: RankBlocks(own, ranks, cut))
                    for layer, cut in zip(own.layers, self.link.cuts, strict=True)
                ]
            return replace(own, layers=tuple(layers))

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Put a snapshot of any number of processes in a row."""
        with self.link.ranks.turn():
            snapshot, own = self._taken(snapshot)
            super().restore(row, own)
            self._send(snapshot, "restore", row)

    def add(self, snapshot: Snapshot | None = None) -> int:
        with self.link.ranks.turn():
            if snapshot is None:
                row = super().add()
                self.link.ranks.tell("add", self.link.number, row, None)
                return row
            snapshot, own = self._taken(snapshot)
            row = super().add(own)
            self._send(snapshot, "add", row)
            return row

    def in_blocks(self, slots: SlotState, start: int, tensors: Captured) -> Captured:
        ranks = self.link.ranks
        with ranks.turn():
            place, cut = next(
                (place, cut) for place, (cut, each) in enumerate(slot_states(self, self.link.cuts)) if each is slots
            )
            own = super().in_blocks(slots, start, part_of(tensors, cut, 0))
            assert isinstance(own, CapturedBlocks)
            sent: list[Tensor] = []
            ranks.tell("in_blocks", self.link.number, place, start, told(tensors, sent), self._numbered([own]))
            with ranks.together():
                send(ranks.group, sent)
            return RankBlocks(own, ranks, cut)

    def _numbered(self, layers: Sequence[Captured]) -> list[int]:
        """The numbers of all blocks of captured layers."""
        of = self.link.ranks.blocks.of
        return [of(block) for layer in layers for piece in pieces_of(layer) for block in piece.blocks()]

    def _taken(self, snapshot: Snapshot) -> tuple[Snapshot, Snapshot]:
        """(the snapshot, the part of rank 0). Anything but a snapshot of this model goes on as it is: the method that
        gets it refuses it."""
        if not isinstance(snapshot, Snapshot) or differences(snapshot.fingerprint, self.fingerprint):
            return snapshot, snapshot
        if snapshot.media:
            raise UnsupportedError("the snapshot has pictures, which a model over several processes does not read")
        if not isinstance(snapshot.layers, tuple | list) or len(snapshot.layers) != len(self.link.cuts):
            return snapshot, snapshot
        snapshot = in_hand(snapshot, self.link.ranks)
        own = (part_of(layer, cut, 0) for layer, cut in zip(snapshot.layers, self.link.cuts))
        return snapshot, replace(snapshot, layers=tuple(own))

    def _send(self, snapshot: Snapshot, verb: str, row: int) -> None:
        """Have the others put their parts of a snapshot, which rank 0 has restored, in a row."""
        ranks = self.link.ranks
        sent: list[Tensor] = []
        layers = [told(layer, sent) for layer in snapshot.layers]
        header = (
            list(snapshot.tokens), snapshot.cached, snapshot.frequency_key, snapshot.logits is not None, layers,
            None if snapshot.source is None else told_source(snapshot.source),
        )  # fmt: skip
        ranks.tell(verb, self.link.number, row, header)
        with ranks.together():
            send(ranks.group, sent)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        ranks = self.link.ranks
        with ranks.turn() as outermost:
            twin = super().__deepcopy__(memo)
            twin.link = Link(ranks, self.link.cuts, next(ranks.ids) if outermost else None)
            if outermost:
                ranks.tell("copy", self.link.number, twin.link.number)
            return twin

    def device_step(self, width: int, counts: Tensor | None = None) -> NoReturn:
        raise UnsupportedError("a state over several processes takes no device steps")


def _mirrored(call: MirroredCall) -> Callable[..., Any]:
    """The method as rank 0 has it: the others make the call too."""
    parameters = signature(call.method)

    @wraps(call.method)
    def method(self: MirroredState, *given: Any, **named: Any) -> Any:
        bound = parameters.bind(self, *given, **named)
        bound.apply_defaults()
        _, *values = bound.arguments.items()
        arguments = {name: listed(value) for name, value in values}
        ranks = self.link.ranks
        if call.unless_lost and ranks.failure is not None:
            return call.method(self, **arguments)
        with ranks.turn() as outermost:
            result = call.method(self, **arguments)
            if outermost:
                ranks.tell("call", self.link.number, call.method.__name__, call.told(arguments))
            return result

    return method


for _name, _call in CALLS.items():
    setattr(MirroredState, _name, _mirrored(_call))
