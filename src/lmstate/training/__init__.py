"""Training through the state: models with parameters, the loss of long texts in chunks, adapters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.model import Model
from lmstate.training.adapted import AdaptedModel, LoraModel, adapted_model, load_adapter
from lmstate.training.adapter import Adapter
from lmstate.training.adapter_config import AdapterConfig
from lmstate.training.adaption import AdaptionPromptConfig
from lmstate.training.chunked import hidden_states
from lmstate.training.ia3 import IA3Config
from lmstate.training.lora import LoraConfig
from lmstate.training.lycoris import LoHaConfig, LoKrConfig
from lmstate.training.model import ParameterModel, TrainableModel
from lmstate.training.network_adapter import NetworkAdapter, NetworkAdapterModel, NetworkConfig
from lmstate.training.next_token import loss, next_token_loss
from lmstate.training.openings import PrefixTuningConfig, PromptTuningConfig

__all__ = [
    "AdaptedModel",
    "Adapter",
    "AdapterConfig",
    "AdaptionPromptConfig",
    "IA3Config",
    "LoHaConfig",
    "LoKrConfig",
    "LoraConfig",
    "LoraModel",
    "NetworkAdapter",
    "NetworkAdapterModel",
    "NetworkConfig",
    "ParameterModel",
    "PrefixTuningConfig",
    "PromptTuningConfig",
    "TrainableModel",
    "hidden_states",
    "loss",
    "next_token_loss",
    "open_model",
]

Folder = str | os.PathLike[str]


def open_model(
    weights: WeightLoader,
    trainable: bool | Literal["lora", "adapter"] | AdapterConfig | NetworkConfig,
    lora: LoraConfig | None,
    adapter: Folder | Mapping[str, Folder] | None,
    merge: bool,
) -> Model:
    """The model of an open checkpoint with parameters or adapters; see `lmstate.load`."""
    if not isinstance(trainable, bool | AdapterConfig | NetworkConfig) and trainable not in ("lora", "adapter"):
        raise ModelError(
            f'trainable={trainable!r:.80} was asked for; there are True, False, "lora", "adapter" and the configs of '
            "lmstate.training"
        )
    if merge and adapter is None:
        raise ModelError("merge=True was asked for without an adapter to merge")
    described: object = lora
    if described is not None and not isinstance(described, LoraConfig):
        raise ModelError(f"lora={described!r:.80} was given; it takes a lmstate.training.LoraConfig")
    if lora is not None and (trainable != "lora" or adapter is not None):
        raise ModelError('lora=... describes a new adapter that is trained: it goes with trainable="lora" alone')
    if trainable and (merge or isinstance(adapter, Mapping) or (trainable is True and adapter is not None)):
        raise ModelError('one adapter can be trained on, with trainable="adapter"; it is not merged')
    if isinstance(trainable, AdapterConfig | NetworkConfig) and adapter is not None:
        raise ModelError('a config of a new adapter was given with a folder to train on: give trainable="adapter"')
    if trainable == "adapter" and adapter is None:
        raise ModelError('trainable="adapter" was asked for without adapter=...: give its folder, or trainable="lora"')
    if trainable is True:
        return TrainableModel(weights)
    if not trainable:
        return adapted_model(weights, adapter, merge)
    if isinstance(trainable, NetworkConfig):
        return NetworkAdapterModel(weights, trainable)
    if adapter is None:
        return LoraModel(weights, trainable if isinstance(trainable, AdapterConfig) else lora or LoraConfig())
    loaded = load_adapter(adapter, weights.source.config.get("model_type"))  # type: ignore[arg-type]
    if trainable == "lora" and not isinstance(loaded.config, LoraConfig):
        raise ModelError(f'{adapter} is a {loaded.config.peft_type} adapter: give trainable="adapter" to train on it')
    if isinstance(loaded, NetworkAdapter):
        return NetworkAdapterModel(weights, loaded.config, loaded)
    return LoraModel(weights, loaded.config, loaded)
