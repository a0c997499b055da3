"""The two parts of a snapshot: what each token left by itself, and what layers remember of all tokens together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate.ops.types.block_table import Block
from lmstate.state import LayerState, Snapshot, State
from lmstate.state.blocks import CapturedBlocks, Parts, held_by, nbytes_of
from lmstate.state.layers.composite import CompositeState
from lmstate.state.layers.slots import SlotState

Layers = tuple[Mapping[str, Tensor], ...]


@dataclass(frozen=True)
class Split:
    """Partition of a kind of state's snapshots into per-token tensors and carries.

    A tensor that holds one entry a token, `[..., S, D]` (keys, values, latents), is cut between any two tokens. All
    others (windows, convolution tails, recurrent carries, policies that forget) are a *carry*: of use at its position.
    """

    per_token: tuple[frozenset[str], ...]  # of each layer, the names of the tensors that have one entry a token
    needs_carry: bool  # whether a row cannot go on from what each token left alone
    forced_by: str | None  # the layer kind that a carry is for
    slack: int  # how many positions a row can go back from a carry at no cost

    @staticmethod
    def of(state: State) -> Split:
        kept = [part for layer in state.layers for part in layer.leaves() if not _cuttable(part)]
        kept = [part for part in kept if part.kind != "shared"]
        windows = all(isinstance(part, SlotState) for part in kept)
        return Split(
            tuple(frozenset(_per_token(layer)) for layer in state.layers),
            bool(kept),
            min((part.kind for part in kept), default=None),
            state.layout.rewind if windows else 0,
        )

    def run(self, snapshot: Snapshot, start: int, stop: int) -> Layers:
        """Per-token tensors of the tokens `start .. stop - 1`: blocks that rows may hold too, or copies."""
        return tuple(
            _per_position(layer, names, slice(start, stop)) for layer, names in zip(snapshot.layers, self.per_token)
        )

    def carry(self, snapshot: Snapshot) -> Layers:
        """Carries: the tensors of each layer that summarize all tokens."""
        return tuple(_without(layer, names) for layer, names in zip(snapshot.layers, self.per_token))

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


def copied(layers: Layers) -> Layers:
    """Copies of what somebody else may change: not of blocks."""
    return tuple(_copied(layer) for layer in layers)


def held(layers: Layers | None) -> Iterator[Block | Tensor]:
    """Blocks of layers, which others may hold too, and tensors."""
    for layer in layers or ():
        yield from held_by(layer)


def nbytes(layers: Layers | None) -> int:
    """Bytes held: blocks count whole."""
    return sum(each.nbytes for each in held(layers))


def _per_position(layer: Mapping[str, Tensor], names: frozenset[str], span: slice) -> Mapping[str, Tensor]:
    """Of the named tensors, all of a layer's per-token ones, some positions."""
    if isinstance(layer, CapturedBlocks):
        return layer.cut(span.start, span.stop) if names else {}
    if isinstance(layer, Parts):
        return Parts([_per_position(part, _of_member(names, i), span) for i, part in enumerate(layer.members)])
    return {name: layer[name][..., span, :].clone() for name in layer if name in names}


def _without(layer: Mapping[str, Tensor], names: frozenset[str]) -> Mapping[str, Tensor]:
    if isinstance(layer, CapturedBlocks):
        return {} if names else layer
    if isinstance(layer, Parts):
        return Parts([_without(part, _of_member(names, i)) for i, part in enumerate(layer.members)])
    return {name: tensor for name, tensor in layer.items() if name not in names}


def _of_member(names: frozenset[str], member: int) -> frozenset[str]:
    prefix = f"{member}."
    return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _cut(layer: Mapping[str, Tensor], start: int, stop: int | None) -> Mapping[str, Tensor]:
    if isinstance(layer, CapturedBlocks):
        return layer.cut(layer.start + start, layer.stop if stop is None else layer.start + stop)
    if isinstance(layer, Parts):
        return Parts([_cut(part, start, stop) for part in layer.members])
    return {name: tensor[..., start:stop, :] for name, tensor in layer.items()}


def _copied(layer: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(layer, CapturedBlocks):
        return layer
    if isinstance(layer, Parts):
        return Parts([_copied(part) for part in layer.members])
    return {name: tensor.clone() for name, tensor in layer.items()}


def _joined(pieces: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Pieces of a layer that follow each other."""
    if len(pieces) <= 1:
        return pieces[0] if pieces else {}
    blocks = [piece for piece in pieces if isinstance(piece, CapturedBlocks)]
    if len(blocks) == len(pieces):
        return CapturedBlocks.joined(blocks)
    parts = [piece for piece in pieces if isinstance(piece, Parts)]
    if len(parts) == len(pieces):
        return Parts([_joined(members) for members in zip(*(part.members for part in parts))])
    return {name: torch.cat([piece[name] for piece in pieces], dim=-2) for name in pieces[0]}


def _united(run: Mapping[str, Tensor], carry: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Union of what tokens left and what summarizes them, which have no names in common."""
    if not carry or not run:
        return run or carry
    if isinstance(run, Parts) and isinstance(carry, Parts):
        return Parts([_united(*both) for both in zip(run.members, carry.members)])
    return {**run, **carry}


def _cuttable(part: LayerState) -> bool:
    return isinstance(part, SlotState) and part.window_span is None


def _per_token(layer: LayerState) -> Iterable[str]:
    if _cuttable(layer):
        assert isinstance(layer, SlotState)
        return layer.buffers
    if type(layer) is CompositeState:
        return [f"{i}.{name}" for i, member in enumerate(layer.members) for name in _per_token(member)]
    return ()
