"""The two parts of a snapshot: what each token left by itself, and what layers remember of all tokens together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate.state import LayerState, Snapshot, State
from lmstate.state.layers.composite import CompositeState
from lmstate.state.layers.slots import SlotState

Layers = tuple[dict[str, Tensor], ...]


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
        """Copies of what the tokens `start .. stop - 1` left."""
        return tuple(
            {name: layer[name][..., start:stop, :].clone() for name in layer if name in names}
            for layer, names in zip(snapshot.layers, self.per_token)
        )

    def carry(self, snapshot: Snapshot) -> Layers:
        """Carries: the tensors of each layer that summarize all tokens."""
        return tuple(
            {name: tensor for name, tensor in layer.items() if name not in names}
            for layer, names in zip(snapshot.layers, self.per_token)
        )

    def sizes(self, snapshot: Snapshot) -> tuple[int, int]:
        """Bytes of the carry of a snapshot, and of what one of its tokens left."""
        tokens = sum(
            nbytes(({name: layer[name][..., :1, :]},))
            for layer, names in zip(snapshot.layers, self.per_token)
            for name in names & layer.keys()
        )
        return nbytes(self.carry(snapshot)), tokens

    @staticmethod
    def join(runs: Sequence[Layers], carry: Layers | None) -> Layers:
        """The layers of a snapshot, from the runs of its tokens one after the other."""
        count = len(runs[0]) if runs else len(carry or ())
        joined: list[dict[str, Tensor]] = [{} for _ in range(count)]
        for index, layer in enumerate(joined):
            for name in runs[0][index] if runs else ():
                pieces = [run[index][name] for run in runs]
                layer[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)
            layer.update(carry[index] if carry is not None else {})
        return tuple(joined)


def cut(layers: Layers, start: int, stop: int | None = None) -> Layers:
    """Views of a run's tokens `start .. stop - 1`."""
    return tuple({name: tensor[..., start:stop, :] for name, tensor in layer.items()} for layer in layers)


def copied(layers: Layers) -> Layers:
    return tuple({name: tensor.clone() for name, tensor in layer.items()} for layer in layers)


def nbytes(layers: Layers | None) -> int:
    return sum(tensor.nbytes for layer in layers or () for tensor in layer.values())


def _cuttable(part: LayerState) -> bool:
    return isinstance(part, SlotState) and part.window_span is None


def _per_token(layer: LayerState) -> Iterable[str]:
    if _cuttable(layer):
        assert isinstance(layer, SlotState)
        return layer.buffers
    if type(layer) is CompositeState:
        return [f"{i}.{name}" for i, member in enumerate(layer.members) for name in _per_token(member)]
    return ()
