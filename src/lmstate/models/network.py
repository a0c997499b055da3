"""The computation of a model with its weights: tokens -> the stream after the blocks -> logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.block import Block, adding, at_hand, opened
from lmstate.models.config import ModelConfig
from lmstate.models.encoder import Encoder
from lmstate.models.forward import Keep
from lmstate.models.graphs import StepGraphs
from lmstate.models.heads.ahead import read
from lmstate.models.heads.head import DraftHead
from lmstate.models.layers.cross_attention import CrossAttention
from lmstate.models.layers.embedding import EmbeddingHook, LearnedPositions, OutputHook
from lmstate.models.layers.opening import LearnedOpening
from lmstate.models.layers.rope import Rope
from lmstate.models.stack import FusedSegment, PlanOwner, arrived, compile_blocks, run_stack, run_tapped
from lmstate.ops import Norm, Weight, dispatch
from lmstate.state import LayerState, SourceFeatures, Step
from lmstate.state.media import depth, overlaid

HEAD_ROWS = 128  # rows of logits at a time: the references need as much memory again for them
GRAPH_ROWS = 32  # of a compiled graph, and where a gradient follows


@dataclass(frozen=True, eq=False)
class Network:
    """An embedding, a stack of blocks, a head: a value that never changes. Training builds another one."""

    config: ModelConfig
    embed: Weight  # [V, E]
    blocks: tuple[Block, ...]
    norm: Norm
    head: Weight  # [V, E]; the embedding itself where they are tied
    head_bias: Tensor | None = None
    entry: EmbeddingHook | None = None
    exit: OutputHook | None = None
    heads: tuple[DraftHead, ...] = ()  # that draft; a state has a layer for each after the blocks'
    encoder: Encoder | None = None  # of the source that the tokens read, see `State.condition`
    opening: LearnedOpening | None = None  # learned positions in front of every row

    @property
    def device(self) -> torch.device:
        """The device of the embedding: where tokens go."""
        return self.embed.device

    @property
    def output_device(self) -> torch.device:
        """The device of the head: where logits and hidden states come from."""
        return self.head.device

    @property
    def devices(self) -> list[torch.device]:
        """The device of each block."""
        return [block.device or self.device for block in self.blocks]

    @property
    def offloaded(self) -> list[int]:
        """The numbers of the blocks whose weights are in host memory, while they compute on another device."""
        return [index for index, block in enumerate(self.blocks) if block.offload is not None]

    @property
    def parts(self) -> tuple[Any, ...]:
        """Modules that hold weights, in the order of a fingerprint."""
        whole = self.embed, self.blocks, self.norm, self.head, self.head_bias, self.entry, self.exit
        more = (self.heads, self.encoder) if self.encoder is not None else (self.heads,) if self.heads else ()
        return (*whole, *more) if self.opening is None else (*whole, *more, self.opening.digest)

    @property
    def leaves_padding_out(self) -> bool:
        """Whether a step costs what its tokens cost, however unequal its rows: native bodies run the whole stack.

        Else what is to the right of a row's tokens is computed too.
        """
        if self.heads or any(device.type != "cpu" for device in self.devices) or dispatch.choice().library is None:
            return False
        return all(isinstance(segment, FusedSegment) for segment in compile_blocks(self.blocks))

    @property
    def max_positions(self) -> int | None:
        """Number of learned position embeddings; None: any position will do."""
        return self.entry.count if isinstance(self.entry, LearnedPositions) else None

    @cached_property
    def ropes(self) -> list[Rope]:
        """The ropes of the blocks."""
        found = [getattr(block.mixer, "rope", None) for block in self.blocks]
        return [rope for rope in found if isinstance(rope, Rope)]

    @cached_property
    def dynamic_ropes(self) -> list[Rope]:
        """The ropes whose frequencies depend on the length of the text."""
        return [rope for rope in self.ropes if rope.original_max_positions is not None]

    @cached_property
    def graphs(self) -> StepGraphs:
        """Its short steps as CUDA graphs, on a GPU."""
        return StepGraphs(self)

    @property
    def has_axes(self) -> bool:
        """Whether positions have several axes."""
        return any(rope.axes is not None for rope in self.ropes)

    @cached_property
    def whole_pictures(self) -> bool:
        """Whether the tokens of a picture see all of it in some layer, so that it is computed as one piece."""
        return any(getattr(block.mixer, "whole_pictures", False) for block in self.blocks)

    def frequency_key(self, length: int) -> int:
        """A number that two lengths of a text share if keys are rotated alike in both."""
        return max((rope.frequency_key(length) for rope in self.dynamic_ropes), default=0)

    def encoded(self, source: Sequence[int] | SourceFeatures) -> list[dict[str, Tensor]]:
        """Of a source, the keys and values `[K, S, D]` that each block attends to; empty for the other blocks."""
        assert self.encoder is not None, "a model without an encoder has no sources"
        encoding = self.encoder(source)

        def keys_values(block: Block) -> dict[str, Tensor]:
            mixer = block.mixer
            return mixer.keys_values(arrived(encoding, block)) if isinstance(mixer, CrossAttention) else {}

        return [at_hand(block, keys_values) for block in self.blocks]

    def blocks_of(self, step: Step) -> Sequence[Block]:
        """The blocks as they run in a step: after the first ones, with what pictures add to the stream there; where
        it has learned positions, with their keys and values."""
        if not step.media:
            return self.blocks
        blocks: Sequence[Block] = self.blocks
        if self.opening is not None and (learned := self.opening.keys_in(step)):
            blocks = list(map(opened, blocks, learned))
        deep = depth(step.media, step.starts, step.ends, self.config.hidden_size)
        return [*map(adding, blocks[:deep], range(deep)), *blocks[deep:]] if deep else blocks

    def embedded(self, tokens: Tensor, step: Step) -> Tensor:
        """The stream in front of the first block: tokens int64 `[R, T]`, here or on the host -> float32
        `[R, T, E]`."""
        tokens = tokens.to(self.device)
        x = self.embed.rows(tokens)
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        if step.media:
            x = overlaid(x, step.media, step.starts, step.ends)
        return x if self.entry is None else self.entry(x, tokens, step)

    def stream(
        self,
        tokens: Tensor,
        step: Step,
        layers: Sequence[LayerState],
        state: PlanOwner | None = None,
        keep: Keep = None,
    ) -> Tensor:
        """Run the blocks over a step: tokens int64 `[R, T]` -> the stream after them, float32 `[R, T, E]`.

        Eagerly, unless `state`, whose layers these are, keeps the plan. keep: see `Run`.
        """
        graphed = state is not None and not torch.compiler.is_compiling()
        if graphed and (x := self.graphs.run(tokens, step, layers, keep)) is not None:
            return x
        reads = len(layers) > len(self.blocks)  # heads read the whole stream
        tapped: list[Tensor] = []
        x, blocks = self.embedded(tokens, step), self.blocks_of(step)
        owner = state if blocks is self.blocks else None  # a plan is of the network's own blocks
        if reads and self.heads[0].taps:
            x, tapped = run_tapped(blocks, x, step, layers, owner, self.heads[0].taps)
        else:
            x = run_stack(blocks, x, step, layers, owner, None if reads else keep)
        x = x if self.exit is None else self.exit(x)
        if not reads:
            return x
        self.have_heads_read(x, tokens, step, layers, tapped)
        return x if keep is None else ops.last_tokens(x, step.counts, keep)

    def have_heads_read(
        self,
        stream: Tensor,
        tokens: Tensor,
        step: Step,
        layers: Sequence[LayerState],
        tapped: Sequence[Tensor] = (),
    ) -> None:
        """Have the heads read a step, where the state has layers of theirs: `stream` `[R, T, E]` after the blocks."""
        if caches := layers[len(self.blocks) :]:
            on = self.output_device
            read(self.heads, self.norm, stream, tokens.to(on), step.on(on), caches, [each.to(on) for each in tapped])

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[n, E]` -> float32 `[n, V]`; `in_blocks` takes any number of rows."""
        logits = ops.linear(hidden, self.head, self.head_bias, norm=self.norm, out=out)
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        if torch.compiler.is_compiling() or logits.requires_grad:
            logits = logits if scale == 1.0 else logits * scale
            return logits if cap is None else ops.in_double(torch.tanh, logits / cap) * cap
        if scale != 1.0:
            logits.mul_(scale)
        return logits if cap is None else logits.copy_(ops.in_double(torch.tanh, logits.div_(cap))).mul_(cap)


def in_blocks(head: Callable[[Tensor, Tensor | None], Tensor], hidden: Tensor, out: Tensor | None = None) -> Tensor:
    """Hidden states `[..., E]` through a head that takes `[n, E]`, by blocks of few rows -> float32 `[..., V]`.

    So compiled graphs and references do not need as much memory again. In `out`, of that shape, without gradients.
    """
    if out is not None and not out.is_contiguous():
        for row, into in zip(hidden, out, strict=True):
            in_blocks(head, row, into)
        return out
    rows, done = hidden.flatten(0, -2), 0
    if out is None:
        if rows.shape[0] <= GRAPH_ROWS:
            made = head(rows, None)
            return made.view(*hidden.shape[:-1], made.shape[-1])
        blocks = rows.split(GRAPH_ROWS)
        first = head(blocks[0], None)
        if torch.compiler.is_compiling() or first.requires_grad:
            return torch.cat([first, *(head(block, None) for block in blocks[1:])]).unflatten(0, hidden.shape[:-1])
        out, done = first.new_empty(*hidden.shape[:-1], first.shape[-1]), len(first)
        out.view(len(rows), -1)[:done] = first
    flat = out.view(len(rows), out.shape[-1])
    for start in range(done, len(rows), HEAD_ROWS):
        head(rows[start : start + HEAD_ROWS], flat[start : start + HEAD_ROWS])
    return out
