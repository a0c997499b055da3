"""Gemma 4's assistant: a drafter without keys of its own, which attends to those of its model.

    y = blocks(pre [embedding of token p + 1; h_p])  at position p + 1,  z = norm(y),  logits = head(z),  h' = post z

h_p is the model's last hidden state of token p. The queries of a block attend to the keys and values of tokens 0 .. p
in the model's last layer of the same kind. Drafting goes on with the drafted token and h', at the same position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.block import Block
from lmstate.models.heads.head import DraftHead
from lmstate.models.layers.attention import Attention
from lmstate.models.stack import run_eager
from lmstate.ops import Norm, Weight
from lmstate.state import KeyValueState, LayerState, Layout, SharedState, Step
from lmstate.state.layers.last_input import LastInputState


@dataclass(frozen=True, eq=False)
class TokenClusters:
    """Tokens in clusters of one size: only those of the `best` clusters get logits of their own.

    `centroids` `[C, E']`; `tokens` int64 `[C, V / C]`: the ids of each cluster.
    """

    centroids: Weight
    tokens: Tensor
    best: int

    def masked(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Logits `[n, V]`, below all others where a token is not in the best clusters for hidden `[n, E']`."""
        chosen = ops.linear(hidden, self.centroids).topk(self.best, dim=-1).indices  # [n, best]
        kept = torch.zeros_like(logits, dtype=torch.bool)
        kept.scatter_(1, self.tokens[chosen].flatten(1), True)
        least = logits.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        return torch.where(kept, logits, least - 1)


@dataclass(frozen=True, eq=False)
class AssistantHead(DraftHead):
    """Weights of the assistant. `sources`: by block, the number of the model's block whose keys it attends to."""

    sources: tuple[int, ...]
    before: Weight  # [E', 2 * E] over the model's E
    behind: Weight  # [E, E']
    blocks: tuple[Block, ...]
    norm: Norm
    embed: Weight  # [V, E], the model's
    embed_scale: float
    head: Weight  # [V, E']
    clusters: TokenClusters | None = None
    depth: int = 1
    taps: tuple[int, ...] = ()

    def reads(self, stream: Tensor, norm: Norm, tapped: Sequence[Tensor]) -> Tensor:
        return ops.norm(stream, norm)

    def joined(self, before: Tensor, tokens: Tensor) -> Tensor:
        words = self.embed.rows(tokens) * self.embed_scale
        return ops.linear(torch.cat([words, before], dim=-1), self.before)

    def handed_on(self, stream: Tensor) -> Tensor:
        return ops.linear(stream, self.behind, norm=self.norm)

    def logits(self, stream: Tensor) -> Tensor:
        hidden = ops.norm(stream, self.norm)
        logits = ops.linear(hidden, self.head)
        return logits if self.clusters is None else self.clusters.masked(logits, hidden)

    def new_state(self, layout: Layout) -> LayerState:
        """Its layer state: the model's last hidden state of each row's last token."""
        return LastInputState(layout, self.behind.out_features, "hidden")

    def drafting(self, x: Tensor, step: Step, layers: Sequence[LayerState]) -> Tensor:
        """The stream after the blocks of x `[R, 1, E']`, at the positions of a step; layers: those of the model."""
        caches = [BorrowedKeys(layers[source], block) for source, block in zip(self.sources, self.blocks)]
        return run_eager(self.blocks, x, step, caches)


class BorrowedKeys(SharedState):
    """The keys and values of the tokens before a step in a layer of the model, for queries that are in the step.

    In a window those of `window + 1` tokens, or fewer after a rewind that left fewer.
    """

    def __init__(self, source: LayerState, block: Block) -> None:
        assert isinstance(source, KeyValueState) and isinstance(block.mixer, Attention)
        super().__init__(source)
        self.window = block.mixer.window

    def view(self, step: Step) -> None:
        """None: native bodies read what is at a step's own positions, too."""

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        params: ops.AttentionParams,
        rotation: ops.RopeTables | None = None,
    ) -> Tensor:
        if rotation is not None:
            q = ops.rope(q, *rotation)
        starts = tuple(max(start - count, 0) for start, count in zip(step.starts, step.counts))
        back = step.cached("the tokens before", lambda: step.part(starts, step.counts))
        return self.source.attend_stored(q, back, params, self._mask(step))

    def _mask(self, step: Step) -> ops.CausalMask:
        if self.window is None:
            return ops.FULL_CAUSAL
        seen = self.window + 1
        for row, start, _ in step.spans:
            if earliest := self.source.earliest_rewind(row, start):  # from there on all that a window needs is held
                seen = min(seen, start - earliest + self.window - 1)
        return ops.CausalMask(seen)
