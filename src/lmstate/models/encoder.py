"""The encoder of a model that answers to a source: a stack of blocks without state, which reads a text as one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import CapacityError
from lmstate.models.block import Block
from lmstate.models.layers.embedding import EmbeddingHook, LearnedPositions
from lmstate.ops import Norm, Weight
from lmstate.state import CompositeState, Step


@dataclass(frozen=True, eq=False)
class Encoder:
    """Token ids of a source -> its encoding, which the layers of the decoder make their keys and values of.

    `start_id`: the token that every answer begins with; it is given to the decoder and is not part of the answer.
    """

    embed: Weight  # [V, E]
    blocks: list[Block]
    norm: Norm | None
    start_id: int
    entry: EmbeddingHook | None = None
    embed_scale: float = 1.0

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Float32 `[1, S, E]` of S ids. Raises `CapacityError` for more than it has learned positions for."""
        count = len(ids)
        if isinstance(self.entry, LearnedPositions) and count > self.entry.count:
            raise CapacityError(
                f"a source of {count} tokens was given; the encoder has learned {self.entry.count} positions and knows "
                "no others: give a shorter source"
            )
        device = self.embed.device
        tokens, step = torch.tensor([list(ids)], device=device), Step((0,), (count,), device, (count,), chunk=count)
        x = self.embed.rows(tokens)
        x = x if self.embed_scale == 1.0 else x * self.embed_scale
        x = x if self.entry is None else self.entry(x, tokens, step)
        nothing = CompositeState([])
        for block in self.blocks:
            x = block(x, step, nothing)
        return x if self.norm is None else ops.norm(x, self.norm)
