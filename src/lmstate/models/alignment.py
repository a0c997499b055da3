"""The attention of the tokens of an answer to its source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.layers.cross_attention import CrossAttention
from lmstate.models.trace import OnSublayer
from lmstate.state import State


class TracedModel(Protocol):
    """The part of an `lmstate.Model` that tells what its sublayers read."""

    @property
    def blocks(self) -> Sequence[Block]: ...

    def trace(self, tokens: Any, state: State | None = None, *, on: OnSublayer) -> Tensor: ...


def cross_weights(model: TracedModel, tokens: Sequence[int], state: State, heads: Sequence[tuple[int, int]]) -> Tensor:
    """See `Model.cross_weights`. The heads of the later half are those of OpenAI's own program."""
    mixers = {f"blocks.{at}.mixer": block.mixer for at, block in enumerate(model.blocks)}
    layers = [(name, mixer) for name, mixer in mixers.items() if isinstance(mixer, CrossAttention)]
    if not heads:
        heads = [(at, head) for at in range(len(layers) // 2, len(layers)) for head in range(layers[at][1].heads)]
    wanted: dict[str, list[int]] = defaultdict(list)
    for layer, head in heads:
        if layer >= len(layers) or head >= layers[layer][1].heads:
            raise ModelError(f"head {head} of layer {layer} was asked for, which the decoder does not have")
        wanted[layers[layer][0]].append(head)
    found: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    def on(name: str, x: Tensor, _: Tensor) -> None:
        if (own := wanted.get(name)) and isinstance(mixer := mixers[name], CrossAttention):
            at = int(name.split(".")[1])
            each = mixer.weights(x, state.layers[at], model.blocks[at].mixer_norm, own)
            for head, weights in zip(own, each):
                found[name, head].append(weights)

    model.trace([list(tokens)], state, on=on)
    return torch.stack([torch.cat(found[layers[layer][0], head]) for layer, head in heads])
