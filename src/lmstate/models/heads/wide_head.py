"""A multi-token prediction head on wide residual streams (DeepSeek-V4, Qwen4-Exp).

    s = hidden_project norm(s_p) + embed_project norm(embedding of token p + 1),  for each of N streams after token p
    s = blocks(s),  logits = head(norm(mix(s)))

The head hands its own streams on, for the token after the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lmstate import ops
from lmstate.models.heads.head import DraftHead
from lmstate.models.layers.hyper_connection import GatedStreams, HyperBlock, StreamMixer
from lmstate.ops import Norm, Weight


@dataclass(frozen=True, eq=False)
class WideHead(DraftHead):
    """Weights of the head. `taps`: after the model's last block, in front of what mixes its streams."""

    depth: int
    taps: tuple[int, ...]
    embed_norm: Norm
    hidden_norm: Norm  # [E] of each stream, or [N * E] of all together
    embed_project: Weight  # [E, E]
    hidden_project: Weight  # [E, E]
    blocks: tuple[HyperBlock, ...]
    exit: StreamMixer | GatedStreams
    norm: Norm
    embed: Weight  # [V, E], the model's
    head: Weight  # [V, E], the model's

    @property
    def width(self) -> int:
        return self.exit.streams * len(self.norm.weight)

    def reads(self, stream: Tensor, norm: Norm, tapped: Sequence[Tensor]) -> Tensor:
        return tapped[0]

    def joined(self, before: Tensor, tokens: Tensor) -> Tensor:
        embedded = ops.linear(self.embed.rows(tokens), self.embed_project, norm=self.embed_norm)  # [R, T, E]
        normed = ops.norm(before.unflatten(-1, (-1, len(self.hidden_norm.weight))), self.hidden_norm)
        streams = normed.flatten(-2).unflatten(-1, (self.exit.streams, -1))  # [R, T, N, E]
        return (ops.linear(streams, self.hidden_project) + embedded[..., None, :]).flatten(-2)

    def handed_on(self, stream: Tensor) -> Tensor:
        return stream

    def logits(self, stream: Tensor) -> Tensor:
        return ops.linear(self.exit(stream), self.head, norm=self.norm)
