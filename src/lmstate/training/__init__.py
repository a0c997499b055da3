"""Training through the state."""

from __future__ import annotations

from typing import Literal

from lmstate.errors import ModelError
from lmstate.models.decoder import Model
from lmstate.models.weights.weights import Weights
from lmstate.training.loss import loss
from lmstate.training.model import TrainableModel

__all__ = ["TrainableModel", "loss", "trainable_model"]


def trainable_model(weights: Weights, trainable: bool | Literal["lora"]) -> Model:
    """The model of an open checkpoint, ready to be trained; see `lmstate.load`."""
    if trainable is True:
        return TrainableModel(weights)
    raise ModelError(f'trainable={trainable!r} was asked for; there are True, False and "lora"')
