"""lmstate: the inference state of a language model as one value.

    model = lmstate.load("smollm2")
    state = model.new_state()
    logits = model(tokens, state)

Where the token stream is cut never matters: fed whole, in chunks, drafted and half rejected, rewound, forked, saved and
restored, the logits are those of feeding it whole.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lmstate.errors import (
    CapacityError,
    GrammarError,
    ModelError,
    PendingError,
    RewindError,
    SnapshotError,
    StateError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from lmstate import kv
    from lmstate.engine import Engine
    from lmstate.generation import SamplingParams
    from lmstate.loading import load
    from lmstate.models.model import Model
    from lmstate.state import BlockPool, Media, Snapshot, SnapshotFolder, SourceFeatures, State
    from lmstate.threads import set_threads

__version__ = "0.1.0"

__all__ = [
    "BlockPool",
    "CapacityError",
    "Engine",
    "GrammarError",
    "Media",
    "Model",
    "ModelError",
    "PendingError",
    "RewindError",
    "SamplingParams",
    "Snapshot",
    "SnapshotError",
    "SnapshotFolder",
    "SourceFeatures",
    "State",
    "StateError",
    "UnsupportedError",
    "kv",
    "load",
    "set_threads",
]

# Importing torch takes seconds: what needs it is imported when first asked for, so that `lmstate --help` need not wait.
_LAZY = {
    "BlockPool": "lmstate.state",
    "Engine": "lmstate.engine",
    "Media": "lmstate.state",
    "Model": "lmstate.models.model",
    "SamplingParams": "lmstate.generation",
    "Snapshot": "lmstate.state",
    "SnapshotFolder": "lmstate.state",
    "SourceFeatures": "lmstate.state",
    "State": "lmstate.state",
    "load": "lmstate.loading",
    "set_threads": "lmstate.threads",
}


def __getattr__(name: str) -> object:
    if name == "kv":
        return import_module("lmstate.kv")
    if name not in _LAZY:
        raise AttributeError(f"module 'lmstate' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
