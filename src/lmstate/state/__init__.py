"""The inference state: what the project exists for. It knows no model."""

from lmstate.state.attention import AttentionState, KeyValueState
from lmstate.state.composite import CompositeState
from lmstate.state.fold import FoldState
from lmstate.state.kv.evicting_latent import EvictingLatentState
from lmstate.state.kv.factory import attention_state, latent_state
from lmstate.state.latent import LatentState
from lmstate.state.layer import LayerState, Layout
from lmstate.state.shared import SharedState
from lmstate.state.snapshot import Snapshot
from lmstate.state.state import State
from lmstate.state.step import Step

__all__ = [
    "AttentionState",
    "CompositeState",
    "EvictingLatentState",
    "FoldState",
    "KeyValueState",
    "LatentState",
    "LayerState",
    "Layout",
    "SharedState",
    "Snapshot",
    "State",
    "Step",
    "attention_state",
    "latent_state",
]
