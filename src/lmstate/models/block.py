"""A block of a decoder: a mixer and a feed-forward part on the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.base import FusableLayer, Mixer
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.layers.opening import LearnedKeys
from lmstate.models.offload import Offload, Result
from lmstate.ops import Norm, Residual
from lmstate.state import KeyValueState, LayerState, Layout, SharedState, Step
from lmstate.state.media import deepened


@dataclass(frozen=True, eq=False)
class Block:
    """A mixer and a feed-forward part, each with a norm before it, after it, or both, on the residual stream."""

    fusable: ClassVar[bool] = True
    """Whether its parts may run without `__call__`: False for a subclass that does something between them."""

    mixer: Mixer
    mlp: FeedForward | None
    mixer_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mixer_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    scale: float = 1.0  # of what each part adds to the stream
    parallel: bool = False  # both parts read the same input
    output_hook: Callable[[Tensor, Step], Tensor] | None = None  # applied to the stream after both, `[R, T, E]`
    device: torch.device | None = None  # where it is, in a model over several devices
    offload: Offload[Any] | None = None  # of a block whose weights are in host memory: what brings them to `device`

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        """x float32 `[R, T, E]` -> `[R, T, E]`."""
        mixed = self.mix(x, step, cache)
        if self.mlp is not None:
            mixed = self.feed(x if self.parallel else mixed, mixed)
        return mixed if self.output_hook is None else self.output_hook(mixed, step)

    def last(self, x: Tensor, step: Step, cache: LayerState, keep: Sequence[int]) -> Tensor:
        """The block as the last one, whose output is read only at the last `keep[r]` tokens of each row: the part of it
        that works token by token is done for those. -> as `ops.last_tokens` gives them."""
        if not self.fusable or self.mlp is None or self.output_hook is not None:
            return ops.last_tokens(self(x, step, cache), step.counts, keep)
        mixed = ops.last_tokens(self.mix(x, step, cache), step.counts, keep)
        if not any(keep):
            return mixed
        return self.feed(ops.last_tokens(x, step.counts, keep) if self.parallel else mixed, mixed)

    def mix(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        """The stream x after the mixer."""
        return self.mixer(x, step, cache, self.mixer_norm, Residual(x, self.mixer_post_norm, self.scale))

    def feed(self, x: Tensor, stream: Tensor) -> Tensor:
        """The stream after the feed-forward part, which reads x."""
        assert self.mlp is not None
        return self.mlp(x, self.mlp_norm, Residual(stream, self.mlp_post_norm, self.scale))

    def new_state(self, layout: Layout) -> LayerState:
        """The state of its mixer, and of what else it remembers."""
        return self.mixer.new_state(layout)

    @property
    def reads(self) -> int | None:
        """The block whose keys and values this one attends to, where they are not its own."""
        return self.mixer.reads if isinstance(self.mixer, Attention) else None

    @cached_property
    def mixer_sublayers(self) -> tuple[ops.Sublayer, ...]:
        """The mixer as native bodies know it; empty where they do not."""
        if not isinstance(self.mixer, FusableLayer):
            return ()
        return self.mixer.sublayers(self.mixer_norm, self.mixer_post_norm, self.scale)

    @cached_property
    def mlp_sublayers(self) -> tuple[ops.Sublayer, ...]:
        """Sublayers of the feed-forward part, as `mixer_sublayers`."""
        if not isinstance(self.mlp, MLP | MixtureOfExperts):
            return ()
        return self.mlp.sublayers(self.mlp_norm, self.mlp_post_norm, self.scale, self.parallel)


def at_hand(block: Block, compute: Callable[[Block], Result]) -> Result:
    """Compute with a block whose weights are on its device."""
    return compute(block) if block.offload is None else block.offload.run(block, compute)


def adding(block: Block, index: int) -> Block:
    """A block after which the pictures of a step add to the stream, as they do after that of this number."""

    def hook(x: Tensor, step: Step) -> Tensor:
        own = x if block.output_hook is None else block.output_hook(x, step)
        return deepened(own, step.media, step.starts, step.ends, index)

    return replace(block, output_hook=hook)


def opened(block: Block, learned: LearnedKeys) -> Block:
    """A block whose attention has learned keys and values at its first positions."""
    assert isinstance(block.mixer, Attention)
    return replace(block, mixer=replace(block.mixer, learned=learned))


def new_layers(blocks: Iterable[Block], layouts: Iterable[Layout]) -> list[LayerState]:
    """A layer state for each block, on its device."""
    layers: list[LayerState] = []
    for block, layout in zip(blocks, layouts):
        if block.reads is None:
            own = layout if block.device is None else replace(layout, device=block.device)
            layers.append(block.new_state(own))
        else:
            source = layers[block.reads]
            assert isinstance(source, KeyValueState)
            layers.append(SharedState(source))
        layers[-1].device = block.device
    return layers
