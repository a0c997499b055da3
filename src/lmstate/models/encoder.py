"""The encoder of a model that answers to a source: a stack of blocks without state, which reads it as one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import CapacityError, StateError
from lmstate.models.block import Block
from lmstate.models.layers.embedding import EmbeddingHook, LearnedPositions
from lmstate.models.layers.sound_frames import SoundFrames
from lmstate.ops import Norm, Weight
from lmstate.state import CompositeState, SourceFeatures, Step


@dataclass(frozen=True, eq=False)
class Encoder:
    """A source -> its encoding, which the layers of the decoder make their keys and values of.

    `start_id`: the token that every answer begins with; it is given to the decoder and is not part of the answer.
    """

    embed: Weight | SoundFrames  # [V, E] of a text
    blocks: list[Block]
    norm: Norm | None
    start_id: int
    entry: EmbeddingHook | None = None
    embed_scale: float = 1.0

    @property
    def hears(self) -> bool:
        """Whether it reads sounds, and not texts."""
        return isinstance(self.embed, SoundFrames)

    @property
    def shortest(self) -> Sequence[int] | SourceFeatures:
        """The shortest source that it reads."""
        return SourceFeatures.of(torch.zeros(self.embed.shape)) if isinstance(self.embed, SoundFrames) else [0]

    def __call__(self, source: Sequence[int] | SourceFeatures) -> Tensor:
        """Float32 `[1, S, E]` of a text of S ids, or of the features of a sound.

        Raises the errors of `check`.
        """
        self.check(source)
        x, tokens = self._features(source) if isinstance(source, SourceFeatures) else self._text(source)
        count, device = x.shape[1], x.device
        step = Step((0,), (count,), device, (count,), chunk=count)
        if self.entry is not None:
            x = self.entry(x, tokens, step)
        nothing = CompositeState([])
        for block in self.blocks:
            x = block(x, step, nothing)
        return x if self.norm is None else ops.norm(x, self.norm)

    def check(self, source: Sequence[int] | SourceFeatures) -> None:
        """Raise `StateError` for a source of the other kind, `CapacityError` for more ids than it has learned positions
        for."""
        if isinstance(source, SourceFeatures):
            if not isinstance(self.embed, SoundFrames):
                raise StateError("a sound was given as a source, and the model's encoder reads texts: give token ids")
            if source.values is None or source.shape != self.embed.shape:
                raise StateError(
                    f"a source of features {list(source.shape)} was given; this model's encoder reads "
                    f"{list(self.embed.shape)}, with their values: make it again with Model.listen"
                )
        elif self.hears:
            raise StateError("a source of token ids was given, and the model's encoder reads sounds: see Model.listen")
        elif isinstance(self.entry, LearnedPositions) and (count := len(source)) > self.entry.count:
            raise CapacityError(
                f"a source of {count} tokens was given; the encoder has learned {self.entry.count} positions and knows "
                "no others: give a shorter source"
            )

    def _text(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The stream, and the ids int64 `[1, S]`."""
        assert not isinstance(self.embed, SoundFrames)
        tokens = torch.tensor([list(ids)], device=self.embed.device)
        x = self.embed.rows(tokens)
        return x if self.embed_scale == 1.0 else x * self.embed_scale, tokens

    def _features(self, source: SourceFeatures) -> tuple[Tensor, Tensor]:
        """The stream, and no ids."""
        assert isinstance(self.embed, SoundFrames) and source.values is not None
        return self.embed(source.values), torch.empty(0, dtype=torch.int64)
