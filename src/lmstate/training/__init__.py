"""Training through the state: models with parameters, the loss of long texts in chunks, LoRA adapters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.model import Model
from lmstate.training.adapted import AdaptedModel, LoraModel, adapted_model
from lmstate.training.chunked import hidden_states
from lmstate.training.lora import Adapter, LoraConfig
from lmstate.training.model import ParameterModel, TrainableModel
from lmstate.training.next_token import loss, next_token_loss

__all__ = [
    "AdaptedModel",
    "Adapter",
    "LoraConfig",
    "LoraModel",
    "ParameterModel",
    "TrainableModel",
    "hidden_states",
    "loss",
    "next_token_loss",
    "open_model",
]

Folder = str | os.PathLike[str]


def open_model(
    weights: WeightLoader,
    trainable: bool | Literal["lora"],
    lora: LoraConfig | None,
    adapter: Folder | Mapping[str, Folder] | None,
    merge: bool,
) -> Model:
    """The model of an open checkpoint with parameters or adapters; see `lmstate.load`."""
    if not isinstance(trainable, bool) and trainable != "lora":
        raise ModelError(f'trainable={trainable!r:.80} was asked for; there are True, False and "lora"')
    if merge and adapter is None:
        raise ModelError("merge=True was asked for without an adapter to merge")
    described: object = lora
    if described is not None and not isinstance(described, LoraConfig):
        raise ModelError(f"lora={described!r:.80} was given; it takes a lmstate.training.LoraConfig")
    if lora is not None and (trainable != "lora" or adapter is not None):
        raise ModelError('lora=... describes a new adapter that is trained: it goes with trainable="lora" alone')
    if trainable and (merge or isinstance(adapter, Mapping) or (trainable is True and adapter is not None)):
        raise ModelError('one adapter can be trained on, with trainable="lora"; it is not merged')
    if trainable is True:
        return TrainableModel(weights)
    if trainable:
        kind = weights.source.config.get("model_type")
        return LoraModel(weights, lora or LoraConfig(), None if adapter is None else Adapter.load(adapter, kind))  # type: ignore[arg-type]
    return adapted_model(weights, adapter, merge)
