"""Values that configs of several families may leave out, and how a config is completed.

Multimodal checkpoints leave out of their `text_config` whatever equals the default of its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from lmstate.checkpoints.config import Config

Defaults: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By `model_type`, the defaults of its config class for the fields that `build` does not take for absent anyway."""

EPS = {"rms_norm_eps": 1e-5}
UNWINDOWED = {"use_sliding_window": False, "sliding_window": 4096}
LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LAYER_NORM_EPS = {"layer_norm_eps": 1e-5}


GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""Names of fields in configs like GPT-2's -> their usual names."""


def with_usual_names(config: Config, names: Mapping[str, str]) -> Config:
    """Return the config with its own fields under their usual names too; `names`: own name -> usual name."""
    usual = {usual: config[own] for own, usual in names.items() if config.given(own)}
    return Config({**config, **usual}, config.where)


def completed(config: Config, defaults: Mapping[str, Any]) -> Config:
    """The config with the defaults of its family. A field that is null is given, and stays null."""
    return Config({**defaults, **config}, config.where)
