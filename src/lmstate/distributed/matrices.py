"""The part of a matrix that one rank of several holds, and the shares that ranks have of heads and of channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lmstate.ops import Norm, Weight
from lmstate.ops.weights.bfloat12 import common_bytes, packed, to_bfloat12
from lmstate.ops.weights.grouped import BLOCK, GROUP
from lmstate.ops.weights.split import Gathering, SplitWeight, SummedWeight, selected, selected_inputs

ParallelMode: TypeAlias = Literal["exact", "sum"]
Units: TypeAlias = tuple[int, ...]
"""The heads, groups or pieces of channels of every rank."""
SPAN = 4
"""Outputs of a float matrix that native bodies read together."""


@dataclass(frozen=True)
class MatrixParts:
    """Makes the parts of matrices for `group.rank` of `ranks`."""

    group: Gathering
    ranks: int
    mode: ParallelMode = "exact"
    _made: dict[tuple[int, bytes], Weight] = field(default_factory=dict, repr=False)
    """Parts of weights by the id of the whole and the outputs: several layers may share one."""

    def outputs(self, weight: Weight, inputs: Sequence[int] | None = None) -> Weight:
        """A share of the outputs of a weight, in blocks as they are stored; the weight where these are too few.

        inputs: as of `SplitWeight`, which is then made in any case.
        """
        widths = shares(weight.out_features, self.ranks, unit_of(weight)) or (
            inputs and shares(weight.out_features, self.ranks)
        )
        if not widths:
            return self.whole(weight)
        return SplitWeight(self.rows(weight, span(widths, self.group.rank)), self.group, widths, inputs)

    def whole(self, weight: Weight) -> Weight:
        """A weight that every rank has, packed as in one process."""
        key = id(weight), b"whole"
        if key not in self._made:
            self._made[key] = to_bfloat12(weight.in_large_pages())
        return self._made[key]

    def rows(self, weight: Weight, outputs: Tensor) -> Weight:
        """Some outputs of a weight, packed as the whole would be: that decides on the bits of its products."""
        key = id(weight), outputs.numpy().tobytes()
        if key not in self._made:
            part, table = selected(weight, outputs).in_large_pages(), common_bytes(weight)
            self._made[key] = part if table is None else packed(part, table)
        return self._made[key]

    def second(self, weight: Weight, inputs: Sequence[int], norm: Norm | None = None) -> Weight:
        """A matrix whose inputs are on the ranks, `inputs[rank]` on each; a norm reads all of them first."""
        unit = group_of(weight)
        if self.mode == "exact" or norm is not None or any(width % unit for width in inputs):
            return self.outputs(weight, inputs)
        own = selected_inputs(weight, sum(inputs[: self.group.rank]), inputs[self.group.rank])
        return SummedWeight(to_bfloat12(own.in_large_pages()), self.group, inputs)


def shares(count: int, ranks: int, unit: int = 1) -> list[int] | None:
    """Parts of `count`, one for each rank, of about the same size and of whole units; None where they are too few."""
    units = -(-count // unit)
    if units < ranks:
        return None
    bounds = [min(count, units * rank // ranks * unit) for rank in range(ranks + 1)]
    return [stop - first for first, stop in pairwise(bounds)]


def heads_of(count: int, ranks: int) -> list[int]:
    """`shares` of enough heads for all ranks."""
    found = shares(count, ranks)
    assert found is not None
    return found


def unit_of(weight: Weight) -> int:
    """Number of outputs that are stored together."""
    return BLOCK if weight.kind in ("int4", "int8") else SPAN


def group_of(weight: Weight) -> int:
    """Number of inputs that share a scale."""
    return GROUP if weight.kind in ("int4", "int8") else 1


def span(widths: Sequence[int], rank: int) -> Tensor:
    """The numbers of a rank's part, int64."""
    first = sum(widths[:rank])
    return torch.arange(first, first + widths[rank])


def features(heads: Tensor, width: int) -> Tensor:
    """The outputs of heads of a width, head after head."""
    return (heads[:, None] * width + torch.arange(width)).flatten()


def times(units: Sequence[int], width: int) -> Units:
    """Features of every rank, of units of a width."""
    return tuple(count * width for count in units)


def at(tensor: Tensor | None, places: Tensor) -> Tensor | None:
    return None if tensor is None else tensor[places].contiguous()
