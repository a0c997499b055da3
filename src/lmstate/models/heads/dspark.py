"""DSpark as DeepSeek-V4 ships it: a drafter of a block of masks on wide residual streams, with latent keys of a window.

    c_p = norm(fuse [mean of the streams after chosen blocks at token p]),  a vector of each layer from c_0 .. c_p
    s = [embed([next token; mask; mask; ...])] * N,  s = blocks(s),  logits = head(norm(mix(s)))

Each query of the block attends to the vectors of the last `window` tokens before the block, and to all of the block's
own. The logits at a token are of the one after it; see `Chained`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.heads.block_head import BlockHead, Chained, NextDraft
from lmstate.models.layers.compressed_attention import CompressedAttention
from lmstate.models.layers.hyper_connection import HyperBlock, StreamMixer
from lmstate.ops import Norm, Weight
from lmstate.ops.attention.attend_whole import as_heads, as_tokens
from lmstate.state import CompositeState, LayerState, Layout, Step, WindowedVectors
from lmstate.state.step import integers


@dataclass(frozen=True, eq=False)
class LatentSpark(BlockHead):
    """Weights of the drafter."""

    taps: tuple[int, ...]
    fuse: Weight  # [E, taps * E]
    fuse_norm: Norm
    blocks: tuple[HyperBlock, ...]
    exit: StreamMixer
    norm: Norm
    embed: Weight  # [V, E], the model's
    head: Weight  # [V, E], the model's
    size: int
    mask: int
    chained: Chained

    @property
    def drafts(self) -> int:
        return self.size

    def reads(self, stream: Tensor, norm: Norm, tapped: Sequence[Tensor]) -> Tensor:
        means = [each.unflatten(-1, (self.exit.streams, -1)).double().mean(-2).float() for each in tapped]
        return ops.norm(ops.linear(torch.cat(means, dim=-1), self.fuse), self.fuse_norm)

    def joined(self, before: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([self.embed.rows(tokens)] * self.exit.streams, dim=-1)

    def logits(self, stream: Tensor) -> Tensor:
        return ops.linear(stream, self.head, norm=self.norm)

    def next(self, stream: Tensor, at: int, token: Tensor) -> NextDraft:
        return self.chained.next(self.logits(stream[:, at]), stream[:, at], token)

    def new_state(self, layout: Layout) -> LayerState:
        """Its layer state: for each block the vectors of a window, of which all are before the next token."""
        return CompositeState([
            WindowedVectors(layout, "k", mixer.dim, mixer.window + 1) for mixer in self._mixers
        ])  # fmt: skip

    def read_context(self, context: Tensor, step: Step, caches: Sequence[LayerState]) -> None:
        for mixer, cache in zip(self._mixers, caches, strict=True):
            assert isinstance(cache, WindowedVectors)
            cache.store(mixer.projected(context, step, None).vector, step)

    def drafted(self, tokens: Tensor, step: Step, caches: Sequence[LayerState]) -> Tensor:
        x = self.joined(tokens, tokens)
        for block, mixer, cache in zip(self.blocks, self._mixers, caches, strict=True):
            assert isinstance(cache, WindowedVectors)
            mixed, found = block.around_mixer.read(x)
            new = mixer.projected(mixed, step, block.mixer_norm)
            cache.store(new.vector, step)
            seen = mixer.written(self._seen(mixer, new.q, step, cache), new.tables)
            x = block.around_mixer.write(x, found, seen)
            mixed, found = block.around_mlp.read(x)
            x = block.around_mlp.write(x, found, block.fed(mixed, step))
        return self.exit(x)

    def _seen(self, mixer: CompressedAttention, q: Tensor, step: Step, cache: WindowedVectors) -> Tensor:
        """Attention of all queries `[R, T, H, D]` to one set: as of heads of the block's last token."""
        params = ops.AttentionParams(mixer.dim**-0.5, sinks=mixer.sinks.repeat(self.size))
        last, one = (integers(step.ends) - 1).clamp(min=0), step.counts_t.clamp(max=1)
        held, mask = cache.vectors, ops.CausalMask(mixer.window + self.size)
        return as_tokens(ops.attend(as_heads(q, 1), held, held, last, one, params, mask), self.size, 1)

    @property
    def _mixers(self) -> list[CompressedAttention]:
        mixers = [block.mixer for block in self.blocks if isinstance(block.mixer, CompressedAttention)]
        assert len(mixers) == len(self.blocks)
        return mixers
