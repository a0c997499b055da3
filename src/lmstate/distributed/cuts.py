"""Cuts of the states of layers among the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lmstate.ops.weights.split import Gathering


class Cut(NamedTuple):
    """The cut of a tensor. Its sections follow each other in one dimension.

    Of a section every rank has `widths[rank]`, in the order of the ranks; where it has a single width, all have it
    whole.
    """

    dim: int
    sections: tuple[tuple[int, ...], ...]

    def fits(self, whole: Tensor) -> bool:
        """Whether it is a cut of such a tensor."""
        return whole.ndim >= max(self.dim + 1, -self.dim) and whole.shape[self.dim] == sum(map(sum, self.sections))

    def gathered(self, group: Gathering, own: Tensor) -> Tensor:
        """The whole tensor, of the part of this rank."""
        sizes = [widths[group.rank] if len(widths) > 1 else widths[0] for widths in self.sections]
        parts = [
            group.gather(part.contiguous(), widths, self.dim) if len(widths) > 1 else part
            for part, widths in zip(own.split(sizes, self.dim), self.sections)
        ]
        return torch.cat(parts, self.dim)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """The part of a rank, of a tensor that it `fits`."""
        parts = [
            section.split(widths, self.dim)[rank] if len(widths) > 1 else section
            for section, widths in zip(whole.split([sum(widths) for widths in self.sections], self.dim), self.sections)
        ]
        return torch.cat(parts, self.dim).contiguous()


@dataclass(frozen=True)
class Members:
    """The cuts of the members of a layer that has several states."""

    cuts: tuple[LayerCut, ...]

    def __bool__(self) -> bool:
        return any(self.cuts)


LayerCut: TypeAlias = tuple[int, ...] | Mapping[str, Cut] | Members
"""The kv heads of every rank, the cut of each tensor of a recurrence, or those of members; empty where each rank has
the layer whole. A tensor of a recurrence without a cut is whole on each rank."""

LayerCuts: TypeAlias = tuple[LayerCut, ...]
"""The cut of the state of each layer."""


def member_of(cut: LayerCut, index: int) -> LayerCut:
    """The cut of a member of a layer; that of the layer where its members hold the same heads."""
    if not isinstance(cut, Members):
        return cut
    return cut.cuts[index] if index < len(cut.cuts) else ()


def cut_of(layer: LayerCut, name: str) -> Cut | None:
    """The cut of a tensor of a layer; None for one that every rank has whole, or that the layer does not have."""
    if isinstance(layer, Members):
        member, _, rest = name.partition(".")
        return cut_of(member_of(layer, int(member)), rest) if member.isdecimal() else None
    if isinstance(layer, Mapping):
        return layer.get(name)
    return Cut(0, (layer,)) if layer else None
