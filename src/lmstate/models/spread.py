"""A model over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lmstate.models.mapped import moved
from lmstate.models.model import Model


def spread(model: Model, devices: Sequence[torch.device]) -> Model:
    """The model with each block on its device, all before them with the first, and all behind them with the last.

    A weight that parts on several devices share (a tied embedding, a block that several layers use) is copied to each.
    """
    done: dict[torch.device, dict[int, Any]] = {device: {} for device in devices}
    first, last = devices[0], devices[-1]
    blocks = [replace(moved(block, on, done[on]), device=on) for block, on in zip(model.blocks, devices, strict=True)]
    return replace(
        model,
        embed=moved(model.embed, first, done[first]),
        entry=moved(model.entry, first, done[first]),
        encoder=moved(model.encoder, first, done[first]),
        blocks=blocks,
        norm=moved(model.norm, last, done[last]),
        head=moved(model.head, last, done[last]),
        head_bias=moved(model.head_bias, last, done[last]),
        exit=moved(model.exit, last, done[last]),
        heads=moved(model.heads, last, done[last]),
    )
