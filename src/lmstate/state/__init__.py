"""The inference state: what the project exists for. It knows no model."""

from lmstate.state.attention import AttentionState
from lmstate.state.composite import CompositeState
from lmstate.state.fold import FoldState
from lmstate.state.latent import LatentState
from lmstate.state.layer import LayerState, Layout
from lmstate.state.snapshot import Snapshot
from lmstate.state.state import State
from lmstate.state.step import Step

__all__ = [
    "AttentionState",
    "CompositeState",
    "FoldState",
    "LatentState",
    "LayerState",
    "Layout",
    "Snapshot",
    "State",
    "Step",
]
