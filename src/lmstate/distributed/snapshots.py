"""Snapshots over several ranks: rank 0 takes and gives them whole, and each rank keeps its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lmstate.distributed.block_numbers import HeldBlocks
from lmstate.distributed.blocks import RankBlocks
from lmstate.distributed.cuts import LayerCut, LayerCuts, cut_of, member_of
from lmstate.distributed.ranks import Collectives, Ranks
from lmstate.errors import SnapshotError
from lmstate.state import LayerState, Snapshot, State
from lmstate.state.blocks import CapturedBlocks, Parts
from lmstate.state.layers.composite import CompositeState
from lmstate.state.layers.slots import SlotState
from lmstate.state.sources import Source, SourceFeatures

Captured = Mapping[str, Tensor]


def gathered(
    group: Collectives, layer: Captured, cut: LayerCut, blocks: Callable[[CapturedBlocks, LayerCut], Captured]
) -> Captured:
    """A captured layer with the tensors of all ranks, and of its blocks what is made of them; every rank calls it."""
    if isinstance(layer, CapturedBlocks):
        return blocks(layer, cut)
    if isinstance(layer, Parts):
        return Parts([gathered(group, each, member_of(cut, at), blocks) for at, each in enumerate(layer.members)])
    if not cut:
        return layer
    whole = dict(layer)
    for name in sorted(layer):
        if (own := cut_of(cut, name)) is not None:
            whole[name] = own.gathered(group, whole[name])
    return whole


def part_of(layer: Captured, cut: LayerCut, rank: int) -> Captured:
    """The part of one rank. Blocks of ranks are those of rank 0. Raises `SnapshotError` for other heads."""
    if isinstance(layer, RankBlocks):
        assert rank == 0
        return layer.own
    if isinstance(layer, Parts):
        return Parts([part_of(each, member_of(cut, at), rank) for at, each in enumerate(layer.members)])
    if not cut or not isinstance(layer, Mapping):
        return layer
    parts = {}
    for name in layer:
        tensor, own = layer[name], cut_of(cut, name)
        if not isinstance(tensor, Tensor) or (own is not None and not own.fits(tensor)):
            raise SnapshotError(f"the snapshot's {name} has other heads than the layer that it is of")
        parts[name] = tensor if own is None else own.part(tensor, rank)
    return parts


def in_hand(snapshot: Snapshot, ranks: Ranks) -> Snapshot:
    """The snapshot with blocks of these ranks alone: those of others are read."""
    return replace(snapshot, layers=tuple(_in_hand(layer, ranks) for layer in snapshot.layers))


def _in_hand(layer: Captured, ranks: Ranks) -> Captured:
    if isinstance(layer, Parts):
        return Parts([_in_hand(member, ranks) for member in layer.members])
    foreign = isinstance(layer, CapturedBlocks) and not (isinstance(layer, RankBlocks) and layer.ranks is ranks)
    return dict(layer) if foreign else layer


# ---- on the way to the others


def told(layer: Captured, tensors: list[Tensor]) -> dict[str, Any]:
    """A layer in JSON values, for `received` on the others. The tensors that they do not have are added to the list."""
    if isinstance(layer, RankBlocks) and layer.blocks():  # one that holds nothing yet goes as tensors
        return {"blocks": layer.told()}
    if isinstance(layer, Parts):
        return {"parts": [told(member, tensors) for member in layer.members]}
    tensors += layer.values()
    return {
        "tensors": {name: [str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in layer.items()}
    }


def send(group: Collectives, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        group.broadcast(tensor.detach().contiguous())


def received(group: Collectives, told: Mapping[str, Any], cut: LayerCut, held: HeldBlocks) -> Captured:
    """The part of this rank of what rank 0 told of, and sends."""
    if "blocks" in told:
        return held.piece(told["blocks"])
    if "parts" in told:
        return Parts([received(group, each, member_of(cut, at), held) for at, each in enumerate(told["parts"])])
    layer = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in told["tensors"].items()}
    for tensor in layer.values():
        group.broadcast(tensor)
    return part_of(layer, cut, group.rank)


def told_source(source: Source) -> list[Any]:
    """A source in JSON values, without the values of features."""
    return ["features", source.to_json()] if isinstance(source, SourceFeatures) else ["ids", list(source)]


def heard_source(told: Sequence[Any]) -> Source:
    kind, value = told
    return SourceFeatures.from_json("a command", value) if kind == "features" else tuple(value)


def slot_states(state: State, cuts: LayerCuts) -> Iterator[tuple[LayerCut, SlotState]]:
    """The parts of a state that keep an entry a token, each with its cut."""
    for cut, layer in leaf_states(state, cuts):
        if isinstance(layer, SlotState):
            yield cut, layer


def leaf_states(state: State, cuts: LayerCuts) -> Iterator[tuple[LayerCut, LayerState]]:
    """The parts of a state that are not composites, each with its cut."""
    for layer, cut in zip(state.layers, cuts, strict=True):
        yield from _leaves_of(layer, cut)


def _leaves_of(layer: LayerState, cut: LayerCut) -> Iterator[tuple[LayerCut, LayerState]]:
    if not isinstance(layer, CompositeState):
        yield cut, layer
        return
    for at, member in enumerate(layer.members):
        yield from _leaves_of(member, member_of(cut, at))
