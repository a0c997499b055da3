"""Divergence of two models: the difference of their streams after every sublayer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lmstate.models.model import Model


class Divergence(NamedTuple):
    """`relative`: the largest difference after a sublayer, as a part of the root mean square of what the first model
    has there."""

    name: str
    relative: float


def divergences(model: Model, other: Model, tokens: Sequence[int]) -> list[Divergence]:
    """The divergence after every sublayer that both models have, in the order in which they run: names as
    `Model.trace` gives them.

    Raises ValueError for models whose streams or logits have other sizes.
    """
    seen: dict[str, Tensor] = {}
    found = []

    def compare(name: str, _: Tensor, there: Tensor) -> None:
        if (here := seen.pop(name, None)) is None:
            return
        if here.shape != there.shape:
            raise ValueError(f"the models differ in size: {name} gives {list(here.shape)} and {list(there.shape)}")
        there = there.float()
        size = here.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        found.append(Divergence(name, float((there - here).abs().max() / size)))

    model.trace([tokens], on=lambda name, _, output: seen.update({name: output.float().cpu().clone()}))
    other.trace([tokens], on=lambda name, input, output: compare(name, input, output.cpu()))
    return found
