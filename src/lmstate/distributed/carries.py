"""Carries of 16 and 8 bits over several ranks: each rounds its part of a carry as one process rounds the whole.

Numbers are rounded in groups of 32, by their places in the whole carry. So a part begins where a group does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch

from lmstate.distributed.cuts import Cut, LayerCuts
from lmstate.distributed.snapshots import leaf_states
from lmstate.errors import UnsupportedError
from lmstate.ops.recurrent.carry_codes import GROUP, scales_of
from lmstate.state import LayerState, Layout, RecurrentState, State

SCALES = "{}.scales"


class StatefulMixer(Protocol):
    def new_state(self, layout: Layout) -> LayerState: ...


def coded_cuts(mixer: StatefulMixer, cut: Mapping[str, Cut]) -> Mapping[str, Cut]:
    """The cuts of the codes and scales that a snapshot has of rounded parts, where groups allow that."""
    state = mixer.new_state(Layout(1, torch.device("meta"), torch.float32, carries=8))
    if not isinstance(state, RecurrentState) or state.rounding is None:
        return {}
    cuts: dict[str, Cut] = {}
    for name, part in zip(state.names, state.carry):
        if name not in state.rounding.sums or name not in cut:
            continue
        (units,), each = cut[name].sections, part[0, 0].numel()
        if not any(width * each % GROUP for width in units[:-1]):
            cuts |= {f"{name}.int{bits}": cut[name] for bits in (16, 8)}
            cuts[SCALES.format(name)] = Cut(0, (tuple(scales_of(width * each) for width in units),))
    return cuts


def round_apart(state: State, cuts: LayerCuts, rank: int) -> None:
    """Have a new state round its part of each carry by the places of the whole.

    Raises `UnsupportedError` where a part does not begin with a group.
    """
    for cut, layer in leaf_states(state, cuts):
        if not isinstance(layer, RecurrentState) or layer.rounding is None or not isinstance(cut, Mapping):
            continue
        first = {}
        for name in layer.rounding.sums & cut.keys():
            if (scales := cut.get(SCALES.format(name))) is None:
                raise UnsupportedError(
                    f"carries={layer.rounding.bits} was asked for; carries are rounded in groups of {GROUP} numbers, "
                    "and the parts of these processes do not begin with one: use carries=32, or another parallel"
                )
            first[name] = GROUP * sum(scales.sections[0][:rank])
        layer.rounding = replace(layer.rounding, first=first)
