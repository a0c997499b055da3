"""A block of a decoder: a mixer and a feed-forward part on the residual stream; and a stack of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lmstate import ops
from lmstate.models.mixers.attention import Attention
from lmstate.models.mixers.mixer import Mixer
from lmstate.models.mlp import MLP, FeedForward
from lmstate.ops import Norm, Residual
from lmstate.state import LayerState, Step


@dataclass(frozen=True, eq=False)
class Block:
    """A mixer and a feed-forward part, each with a norm before it, after it, or both, on the residual stream."""

    mixer: Mixer
    mlp: FeedForward | None
    mixer_norm: Norm | None = None
    mlp_norm: Norm | None = None
    after_mixer: Norm | None = None
    after_mlp: Norm | None = None
    scale: float = 1.0  # of what each part adds to the stream
    parallel: bool = False  # both parts read the same input

    def __call__(self, x: Tensor, step: Step, memory: LayerState) -> Tensor:
        """x float32 `[R, T, E]` -> `[R, T, E]`."""
        mixed = self._mixed(x, step, memory)
        return mixed if self.mlp is None else self._fed(x if self.parallel else mixed, mixed)

    def join(self, run: ops.Run, step: Step, memory: LayerState) -> None:
        """The same to the stream of a run: what can wait there does, the rest runs at once."""
        if not run.native:  # a tracer, say, which cannot follow the lock of a cached property
            run.put(self(run.stream(), step, memory))
            return
        attention, feed_forward = self._attention, self._feed_forward
        if self.parallel and not (run.takes(attention) and run.takes(feed_forward)):
            run.put(self(run.stream(), step, memory))
            return
        mixer = self.mixer
        if attention is None or not (isinstance(mixer, Attention) and mixer.joins(run, attention, step, memory)):
            run.put(self._mixed(run.stream(), step, memory))
        if self.mlp is not None and (feed_forward is None or not run.feeds(feed_forward)):
            run.put(self._fed(x := run.stream(), x))

    def _mixed(self, x: Tensor, step: Step, memory: LayerState) -> Tensor:
        return self.mixer(x, step, memory, self.mixer_norm, Residual(x, self.after_mixer, self.scale))

    def _fed(self, x: Tensor, mixed: Tensor) -> Tensor:
        assert self.mlp is not None
        return self.mlp(x, self.mlp_norm, Residual(mixed, self.after_mlp, self.scale))

    @cached_property
    def _attention(self) -> ops.AttentionHalf | None:
        """The first half, where it is one of those that may wait in a run."""
        if not isinstance(self.mixer, Attention) or self.mixer.temperature is not None:
            return None
        return ops.AttentionHalf(self.mixer, self.mixer_norm, self.after_mixer, self.scale)

    @cached_property
    def _feed_forward(self) -> ops.FeedForwardHalf | None:
        """The second."""
        mlp = self.mlp
        if not isinstance(mlp, MLP) or not mlp.gated:
            return None
        return ops.FeedForwardHalf(
            mlp.up, mlp.down, mlp.act, self.mlp_norm, self.after_mlp, self.scale, mlp.up_bias, mlp.down_bias,
            self.parallel,
        )  # fmt: skip


def run_blocks(blocks: Sequence[Block], x: Tensor, step: Step, layers: Sequence[LayerState]) -> Tensor:
    """The blocks one after the other, x float32 `[R, T, E]` -> `[R, T, E]`."""
    run = ops.Run(x, step.starts_t, step.counts_t)
    for block, memory in zip(blocks, layers):
        block.join(run, step, memory)
    return run.stream()
