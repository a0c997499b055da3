"""DFlash (2602.06036) and DSpark: drafters that fill a block of masks at once, beside a model's hidden states.

    c_p = norm(fuse [streams after chosen blocks at token p]),  keys and values of each layer from c_0 .. c_p
    y = blocks [next token; mask; mask; ...] at positions p + 1 ..,  logits = head(norm(y)), of the model's own head

Queries of the block attend to all c before it, and to all of the block; a layer may have a window or be causal. The
logits at a mask are of its own token.

DSpark's logits are of the token that comes next, and chosen one after the other: those after token t get `after[t]`
of low rank added. It also says how sure it is of each: sigmoid(w [norm(y); before[t]]).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.block import Block
from lmstate.models.heads.block_head import BlockHead, Chained, NextDraft
from lmstate.models.layers.attention import Attention
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import CompositeState, LayerState, Layout, Step
from lmstate.state.layers.context_keys import ContextKeys


@dataclass(frozen=True, eq=False)
class DFlashHead(BlockHead):
    """Weights of the drafter. `size`: tokens of a block, of which the first is known; `mask`: the id of the others.

    `causal`: of each layer, whether tokens of the block see only those before them. `chained`: DSpark's.
    """

    taps: tuple[int, ...]
    fuse: Weight  # [E, taps * E]
    fuse_norm: Norm
    blocks: tuple[Block, ...]
    norm: Norm
    embed: Weight  # [V, E], the model's
    embed_scale: float
    head: Weight  # [V, E], the model's
    size: int
    mask: int
    causal: tuple[bool, ...]
    chained: Chained | None = None

    @property
    def drafts(self) -> int:
        return self.size - (self.chained is None)

    def reads(self, stream: Tensor, norm: Norm, tapped: Sequence[Tensor]) -> Tensor:
        return ops.norm(ops.linear(torch.cat(list(tapped), dim=-1), self.fuse), self.fuse_norm)

    def joined(self, before: Tensor, tokens: Tensor) -> Tensor:
        return self.embed.rows(tokens) * self.embed_scale

    def logits(self, stream: Tensor) -> Tensor:
        return ops.linear(stream, self.head, norm=self.norm)

    def next(self, stream: Tensor, at: int, token: Tensor) -> NextDraft:
        if self.chained is None:
            return NextDraft(self.logits(stream[:, at + 1]))
        own = ops.norm(stream[:, at], self.norm)
        return self.chained.next(ops.linear(own, self.head), own, token)

    def new_state(self, layout: Layout) -> LayerState:
        """Its layer state: keys and values of every token for each of its blocks."""
        return CompositeState([
            ContextKeys(
                layout, mixer.kv_heads, mixer.head_dim, mask=ops.CausalMask(mixer.window),
                rotate_by=None if mixer.rope is None else mixer.rope.rotate_by,
            )
            for mixer in self._mixers
        ])  # fmt: skip

    def read_context(self, context: Tensor, step: Step, caches: Sequence[LayerState]) -> None:
        for mixer, cache in zip(self._mixers, caches, strict=True):
            _, k, v = _projected(mixer, context, None)
            assert isinstance(cache, ContextKeys)
            cache.store(*_turned(mixer, k, v, step), step)

    def drafted(self, tokens: Tensor, step: Step, caches: Sequence[LayerState]) -> Tensor:
        x = self.joined(tokens, tokens)
        for block, mixer, causal, cache in zip(self.blocks, self._mixers, self.causal, caches, strict=True):
            assert isinstance(cache, ContextKeys)
            q, k, v = _projected(mixer, x, block.mixer_norm)
            rotation = mixer.rotation(step)
            cache.store(*_turned(mixer, k, v, step), step)
            q = ops.rope(q, *rotation) if rotation else q
            seen = cache.attend_block(q, step, ops.AttentionParams(mixer.scale), causal=causal)
            x = ops.linear(seen.flatten(-2), mixer.out, mixer.out_bias, residual=Residual(x))
            x = block.feed(x, x)
        return x

    @property
    def _mixers(self) -> list[Attention]:
        mixers = [block.mixer for block in self.blocks if isinstance(block.mixer, Attention)]
        assert len(mixers) == len(self.blocks)
        return mixers


def _projected(mixer: Attention, x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[R, T, H, D]`, keys and values `[R, T, K, D]` of x `[R, T, E]`, normed and not rotated."""
    heads = ops.linear(x, mixer.qkv, mixer.qkv_bias, norm=norm).unflatten(-1, (-1, mixer.head_dim))
    q, k, v = (part.contiguous() for part in heads.split([mixer.heads, mixer.kv_heads, mixer.kv_heads], dim=2))
    assert mixer.q_norm is not None and mixer.k_norm is not None
    return ops.norm(q, mixer.q_norm), ops.norm(k, mixer.k_norm), v


def _turned(mixer: Attention, k: Tensor, v: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Keys at the positions of a step, and the values."""
    rotation = mixer.rotation(step)
    return (k if rotation is None else ops.rope(k, *rotation)), v
