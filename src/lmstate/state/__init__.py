"""The inference state of a batch of sequences. It knows no model."""

from lmstate.state.blocks import BlockPool
from lmstate.state.kv.eviction.latent import EvictingLatentState
from lmstate.state.kv.factory import (
    attention_state,
    compressed_state,
    indexed_attention_state,
    indexed_latent_state,
    keeping_all,
    latent_state,
    pooled_index_state,
    pooled_latent_state,
)
from lmstate.state.layers.attention import AttentionState, KeyValueState
from lmstate.state.layers.base import LayerState, Layout
from lmstate.state.layers.composite import CompositeState
from lmstate.state.layers.compressed import CompressedState, PooledIndexState, Pooling, WindowedVectors
from lmstate.state.layers.cross import CrossState
from lmstate.state.layers.indexed_attention import BlockChoice, ChosenBlocksState, IndexedAttentionState
from lmstate.state.layers.latent import IndexKeys, LatentState
from lmstate.state.layers.pictures import PictureReadingState
from lmstate.state.layers.recurrent import RecurrentState
from lmstate.state.layers.shared_kv import SharedState
from lmstate.state.media import Media, MediaSpan
from lmstate.state.opening import RowOpening
from lmstate.state.snapshot import Snapshot
from lmstate.state.snapshot_folder import SnapshotFolder
from lmstate.state.sources import SourceFeatures
from lmstate.state.state import State
from lmstate.state.step import Step

__all__ = [
    "AttentionState",
    "BlockChoice",
    "BlockPool",
    "ChosenBlocksState",
    "CompositeState",
    "CompressedState",
    "CrossState",
    "EvictingLatentState",
    "IndexKeys",
    "IndexedAttentionState",
    "KeyValueState",
    "LatentState",
    "LayerState",
    "Layout",
    "Media",
    "MediaSpan",
    "PictureReadingState",
    "PooledIndexState",
    "Pooling",
    "RecurrentState",
    "RowOpening",
    "SharedState",
    "Snapshot",
    "SnapshotFolder",
    "SourceFeatures",
    "State",
    "Step",
    "WindowedVectors",
    "attention_state",
    "compressed_state",
    "indexed_attention_state",
    "indexed_latent_state",
    "keeping_all",
    "latent_state",
    "pooled_index_state",
    "pooled_latent_state",
]
