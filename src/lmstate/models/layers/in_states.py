"""Layers that multiply by weights inside their states: these compute too, when a draft is accepted in part say."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from lmstate.models.layers.mamba import Mamba
from lmstate.models.layers.rg_lru import RecurrentBlock
from lmstate.models.layers.rwkv import TimeMix
from lmstate.models.mapped import Change, mapped

READ_BY_STATES: dict[type, tuple[str, ...]] = {
    Mamba: ("select", "dt_project"),
    RecurrentBlock: ("gates",),
    TimeMix: ("key", "value", "receptance"),
}
"""Names of the weights. They stay whole over several processes, and on the device where weights are in host memory."""


def read_by_state(layer: object) -> tuple[str, ...]:
    """The names of a layer's weights that its states read."""
    return next((names for kind, names in READ_BY_STATES.items() if isinstance(layer, kind)), ())


def beside_states(layer: Any, change: Change) -> Any:
    """The layer with its parts changed, as by `mapped`, but for those that its states read."""
    whole = read_by_state(layer)
    parts = {part.name: getattr(layer, part.name) for part in fields(layer) if part.init and part.name not in whole}
    return replace(layer, **{name: mapped(part, change) for name, part in parts.items()})
