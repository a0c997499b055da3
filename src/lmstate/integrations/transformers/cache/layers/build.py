"""The layers of a cache, by the kinds that a model's config has."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from lmstate.integrations.transformers.cache.layers.base import RewindableLayer
from lmstate.integrations.transformers.cache.layers.compressed import CompressedLayer, SparseCompressedLayer
from lmstate.integrations.transformers.cache.layers.full import BlockIndexedLayer, FullAttentionLayer, IndexedLayer
from lmstate.integrations.transformers.cache.layers.hybrid import HybridLayer, HybridWindowLayer
from lmstate.integrations.transformers.cache.layers.recurrent import ConvLayer, RecurrentLayer
from lmstate.integrations.transformers.cache.layers.sliding import WindowLayer

OURS: dict[str, type[RewindableLayer]] = {
    "full_attention": FullAttentionLayer,
    "sliding_attention": WindowLayer,
    "chunked_attention": WindowLayer,
    "indexed_attention": IndexedLayer,
    "minimax_m3_sparse": BlockIndexedLayer,
    "heavily_compressed_attention": CompressedLayer,
    "compressed_sparse_attention": SparseCompressedLayer,
    "conv": ConvLayer,
    "linear_attention": RecurrentLayer,
    "hybrid": HybridLayer,
    "hybrid_sliding": HybridWindowLayer,
}


def new_layers(config: PretrainedConfig, rewind: int) -> list[Any]:
    """Empty layers of a decoder of this config, whose windows can go back `rewind` tokens at no cost."""
    layers = [_layer(kind, arguments, rewind) for kind, arguments in zip(*get_layer_types_and_kwargs(config))]
    return [*layers, *(copy.deepcopy(layers[index]) for index in _looped(config))]


def _looped(config: PretrainedConfig) -> list[int]:
    """Layers that Dory and Inkling 2 run again: caches of later loops are after the others, in the order of calls."""
    if config.model_type == "inkling2_loop_text":
        return [*range(config.loop_layer_index_start, config.loop_layer_index_end)] * (config.loop_num_passes - 1)
    if config.model_type != "dory" or config.recurrent_kv_cache_mode != "per_loop":
        return []
    first, loops = config.n_input_layers, config.n_recurrent_loops
    return [*range(first, first + config.n_recurrent_layers)] * (loops - 1)


def _layer(kind: str, arguments: dict[str, Any], rewind: int) -> Any:
    """A layer of ours, or transformers' own where we have none of the kind (it then keeps transformers' limits)."""
    if kind not in OURS:
        return DYNAMIC_LAYER_TYPE_MAPPING[kind](**arguments)
    ours: Any = OURS[kind]
    if issubclass(ours, WindowLayer):
        arguments = {**arguments, "rewind": rewind}
    return ours(**arguments)
