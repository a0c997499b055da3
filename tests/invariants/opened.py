"""Models with learned positions in front of every row, as prompt tuning and prefix tuning make them."""

from __future__ import annotations

import copy
from functools import cache

import torch

from lmstate.models.model import Model
from lmstate.training import NetworkAdapter, PrefixTuningConfig, PromptTuningConfig
from tests.zoo import ours

POSITIONS = 11


@cache
def opened(case: str, keys: bool, positions: int = POSITIONS) -> Model:
    """A model of the zoo with learned keys and values, or with learned vectors."""
    model = copy.copy(ours(case))
    config = PrefixTuningConfig(positions) if keys else PromptTuningConfig(positions)
    draw = torch.Generator().manual_seed(5)
    learned = {name: torch.randn(shape, generator=draw) for name, shape in config.shapes(model.network).items()}
    model.network, model._fingerprint = NetworkAdapter(config, learned).applied(model.network), None
    return model
