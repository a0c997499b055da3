"""Shares of each of several processes in a model, for `lmstate inspect --parallel`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lmstate.cli.inspect_model import state_bytes
from lmstate.cli.output import size
from lmstate.distributed.cuts import LayerCut
from lmstate.distributed.split import Splitter, layer_cuts
from lmstate.models.model import Model


@dataclass(frozen=True)
class PlannedRank:
    """A rank that holds a part and exchanges nothing."""

    rank: int

    def gather(self, own: Tensor, widths: Sequence[int], dim: int = -1) -> Tensor:
        raise NotImplementedError("a planned rank computes nothing")

    def sum(self, own: Tensor) -> Tensor:
        raise NotImplementedError("a planned rank computes nothing")


def planned(model: Model, ranks: int) -> list[Model]:
    """The part of each process of a model of shapes."""
    cuts = layer_cuts(model.network, ranks)
    parts = (Splitter(PlannedRank(rank), ranks).network(model.network, cuts) for rank in range(ranks))
    return [replace(model, network=part, _fingerprint=None) for part in parts]


def held_rows(model: Model, ranks: int) -> list[tuple[str, ...]]:
    """A line for each process: bytes of its weights, and of the state of one row. The last is of one process alone."""
    parts = [_held(str(rank), part) for rank, part in enumerate(planned(model, ranks))]
    return [*parts, _held("one alone", model)]


def _held(name: str, model: Model) -> tuple[str, ...]:
    _, growing, fixed = state_bytes(model)
    sizes = sum(model.weight_totals.nbytes.values()), growing.total(), fixed.total()
    return (name, *map(size, sizes))


def split_rows(model: Model, ranks: int) -> list[tuple[str, ...]]:
    """Of each kind of layer, how many have their state split."""
    counts: Counter[tuple[str, str]] = Counter()
    for block, cut in zip(model.blocks, layer_cuts(model.network, ranks)):
        if block.mixer.kind != "none":
            counts[block.mixer.kind, _told(cut)] += 1
    return [(str(count), kind, told) for (kind, told), count in counts.items()]


def _told(cut: LayerCut) -> str:
    return "split" if cut else "whole in each process"
