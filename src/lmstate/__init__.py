"""lmstate: the inference state of a language model as one value.

    model = lmstate.load("smollm2")
    state = model.new_state()
    logits = model(tokens, state)

Where the token stream is cut never matters: fed whole, in chunks, drafted and half rejected, rewound, forked, saved and
restored, the logits are those of feeding it whole.
"""

from __future__ import annotations

from lmstate.errors import (
    CapacityError,
    ModelError,
    PendingError,
    RewindError,
    SnapshotError,
    StateError,
    UnsupportedError,
)
from lmstate.models.decoder import Model
from lmstate.models.load import load
from lmstate.state import Snapshot, State

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "Model",
    "ModelError",
    "PendingError",
    "RewindError",
    "Snapshot",
    "SnapshotError",
    "State",
    "StateError",
    "UnsupportedError",
    "load",
]
