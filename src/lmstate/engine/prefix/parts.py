"""The two parts of a snapshot: what each token left by itself, and what layers remember of all tokens together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from lmstate.errors import SnapshotError
from lmstate.ops.types.block_table import KVBlock
from lmstate.state import LayerState, RecurrentState, Snapshot, State
from lmstate.state.blocks import CapturedBlocks, Parts, held_by, nbytes_of, pieces_of
from lmstate.state.layers.composite import CompositeState
from lmstate.state.layers.rounding import INTERVAL
from lmstate.state.layers.slots import SlotState

Layers = tuple[Mapping[str, Tensor], ...]
ANYWHERE = 2**31  # positions: more than a row has
Slots: TypeAlias = "SlotState | tuple[Slots, ...] | None"
"""The part of a layer that has one entry a token: all, or parts of its members; None for nothing."""


@dataclass(frozen=True)
class Split:
    """Partition of a kind of state's snapshots into per-token tensors and carries.

    A tensor that holds one entry a token, `[..., S, D]` (keys, values, latents), is cut between any two tokens. All
    others (windows, convolution tails, recurrent carries, policies that forget) are a *carry*: of use at its position,
    and keys and values of a source at any.
    """

    state: State  # such a one
    per_token: tuple[Slots, ...]  # of each layer
    needs_carry: bool  # whether a row cannot go on from what each token left alone
    forced_by: str | None  # the layer kind that a carry is for
    slack: int  # how many positions a row can go back from a carry at no cost
    interval: int = 1  # positions between two where a carry takes the least bytes

    @staticmethod
    def of(state: State) -> Split:
        kept = [part for layer in state.layers for part in layer.leaves() if not _cuttable(part)]
        kept = [part for part in kept if part.kind != "shared"]
        moving = [part for part in kept if not part.conditioned]  # which tokens change
        windows = all(isinstance(part, SlotState) for part in moving)
        slack = state.layout.rewind if windows else 0
        return Split(
            state,
            tuple(map(_slots, state.layers)),
            bool(kept),
            min((part.kind for part in kept), default=None),
            slack if moving else ANYWHERE,
            INTERVAL if any(isinstance(part, RecurrentState) and part.rounding for part in kept) else 1,
        )

    def run(self, snapshot: Snapshot, start: int, stop: int) -> Layers:
        """Per-token tensors of the tokens `start .. stop - 1`, in blocks that rows may hold too."""
        return tuple(_run(layer, slots, start, stop) for layer, slots in zip(snapshot.layers, self.per_token))

    def carry(self, snapshot: Snapshot) -> Layers:
        """Carries: the tensors of each layer that summarize all tokens."""
        return tuple(map(_carry, snapshot.layers, self.per_token))

    def run_of(self, read: Layers, start: int) -> Layers:
        """A run that was written, of the positions from `start` on, in blocks of its own.

        Raises SnapshotError for anything but a run of such a state.
        """
        return tuple(self._in_blocks(layer, slots, start) for layer, slots in zip(self._whole(read), self.per_token))

    def carry_of(self, read: Layers) -> Layers:
        """The same for carries, and what follows them."""
        return (*map(_in_parts, self._whole(read), self.per_token), *read[len(self.per_token) :])

    def _whole(self, read: Layers) -> Layers:
        if len(read) < len(self.per_token):
            raise SnapshotError(f"{len(read)} layers were read; this state has {len(self.per_token)}")
        return read

    def _in_blocks(self, read: Mapping[str, Tensor], slots: Slots, start: int) -> Mapping[str, Tensor]:
        if isinstance(slots, SlotState):
            return self.state.in_blocks(slots, start, read)
        if slots is None:
            if read:
                raise SnapshotError(f"a run holds {sorted(read)} of a layer that keeps no entry a token")
            return {}
        return Parts([self._in_blocks(_member(read, i), own, start) for i, own in enumerate(slots)])

    def sizes(self, snapshot: Snapshot) -> tuple[int, int]:
        """Bytes of the carry of a snapshot, and of what one of its tokens left."""
        tokens = sum(map(nbytes_of, self.run(snapshot, 0, snapshot.cached)))
        return nbytes(self.carry(snapshot)), -(-tokens // max(snapshot.cached, 1))

    @staticmethod
    def join(runs: Sequence[Layers], carry: Layers | None) -> Layers:
        """The layers of a snapshot, from the runs of its tokens one after the other."""
        count = len(runs[0]) if runs else len(carry or ())
        return tuple(
            _united(_joined([run[index] for run in runs]), {} if carry is None else carry[index])
            for index in range(count)
        )


def cut(layers: Layers, start: int, stop: int | None = None) -> Layers:
    """A run's tokens `start .. stop - 1`, without copying any."""
    return tuple(_cut(layer, start, stop) for layer in layers)


def pieces(layers: Layers) -> Iterator[CapturedBlocks]:
    """All that a run holds, one after the other."""
    for layer in layers:
        yield from pieces_of(layer)


def held(layers: Layers | None) -> Iterator[KVBlock | Tensor]:
    """Blocks of layers, which others may hold too, and tensors."""
    for layer in layers or ():
        yield from held_by(layer)


def nbytes(layers: Layers | None) -> int:
    """Bytes held: blocks count whole."""
    return sum(each.nbytes for each in held(layers))


def _slots(layer: LayerState) -> Slots:
    if _cuttable(layer):
        assert isinstance(layer, SlotState)
        return layer
    return tuple(map(_slots, layer.members)) if type(layer) is CompositeState else None


def _cuttable(part: LayerState) -> bool:
    return isinstance(part, SlotState) and part.window_span is None and not part.conditioned


def _run(layer: Mapping[str, Tensor], slots: Slots, start: int, stop: int) -> Mapping[str, Tensor]:
    if isinstance(slots, SlotState):
        assert isinstance(layer, CapturedBlocks), "a state whose slots are in no blocks"
        return layer.cut(start, stop)
    if slots is None:
        return {}
    assert isinstance(layer, Parts)
    return Parts([_run(part, own, start, stop) for part, own in zip(layer.members, slots)])


def _carry(layer: Mapping[str, Tensor], slots: Slots) -> Mapping[str, Tensor]:
    if isinstance(slots, SlotState):
        return {}
    if slots is None:
        return layer
    assert isinstance(layer, Parts)
    return Parts(list(map(_carry, layer.members, slots)))


def _in_parts(read: Mapping[str, Tensor], slots: Slots) -> Mapping[str, Tensor]:
    if not isinstance(slots, tuple):
        return read
    return Parts([_in_parts(_member(read, i), own) for i, own in enumerate(slots)])


def _member(read: Mapping[str, Tensor], index: int) -> Mapping[str, Tensor]:
    prefix = f"{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in read.items() if name.startswith(prefix)}


def _cut(layer: Mapping[str, Tensor], start: int, stop: int | None) -> Mapping[str, Tensor]:
    if isinstance(layer, CapturedBlocks):
        return layer.cut(layer.start + start, layer.stop if stop is None else layer.start + stop)
    return Parts([_cut(part, start, stop) for part in layer.members]) if isinstance(layer, Parts) else layer


def _joined(runs: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Runs of a layer that follow each other."""
    if len(runs) <= 1:
        return runs[0] if runs else {}
    blocks = [run for run in runs if isinstance(run, CapturedBlocks)]
    if blocks:
        return CapturedBlocks.joined(blocks)
    parts = [run for run in runs if isinstance(run, Parts)]
    return Parts([_joined(members) for members in zip(*(part.members for part in parts))]) if parts else {}


def _united(run: Mapping[str, Tensor], carry: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Union of what tokens left and what summarizes them: each is of other members."""
    if isinstance(run, Parts) and isinstance(carry, Parts):
        return Parts([_united(*both) for both in zip(run.members, carry.members)])
    return run or carry
