"""A block of a decoder: a mixer and a feed-forward part on the residual stream; and a stack of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.base import JoiningMixer, Mixer, Sublayers
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.ops import Norm, Residual
from lmstate.state import CompositeState, KeyValueState, LayerState, Layout, RecurrentState, SharedState, Step


@dataclass(frozen=True, eq=False)
class Block:
    """A mixer and a feed-forward part, each with a norm before it, after it, or both, on the residual stream."""

    mixer: Mixer
    mlp: FeedForward | None
    mixer_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mixer_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    scale: float = 1.0  # of what each part adds to the stream
    parallel: bool = False  # both parts read the same input
    output_hook: Callable[[Tensor, Step], Tensor] | None = None  # what becomes of the stream behind both, `[R, T, E]`

    def __call__(self, x: Tensor, step: Step, memory: LayerState) -> Tensor:
        """x float32 `[R, T, E]` -> `[R, T, E]`."""
        mixed = self._mixed(x, step, memory)
        fed = mixed if self.mlp is None else self._fed(x if self.parallel else mixed, mixed)
        return fed if self.output_hook is None else self.output_hook(fed, step)

    def join(self, run: ops.Run, step: Step, memory: LayerState) -> None:
        """The same to the stream of a run: what can wait there does, the rest runs at once."""
        if not run.native:  # a tracer, say, which cannot follow the lock of a cached property
            run.put(self(run.stream(), step, memory))
            return
        feed_forward = self._feed_forward
        # Parts that read the same input wait both, or neither.
        joined = (not self.parallel or run.takes(feed_forward)) and self._joins(run, step, memory)
        if self.parallel and not joined:
            run.put(self(run.stream(), step, memory))
            return
        if not joined:
            run.put(self._mixed(run.stream(), step, memory))
        if self.mlp is not None and (feed_forward is None or not run.feeds(feed_forward)):
            run.put(self._fed(x := run.stream(), x))
        if self.output_hook is not None:
            run.put(self.output_hook(run.stream(), step))

    def _joins(self, run: ops.Run, step: Step, memory: LayerState) -> bool:
        """Have the mixer wait; False where it cannot."""
        if self._joining is None:
            return False
        mixer, half = self._joining
        return mixer.joins(run, half, step, memory)

    def _mixed(self, x: Tensor, step: Step, memory: LayerState) -> Tensor:
        return self.mixer(x, step, memory, self.mixer_norm, Residual(x, self.mixer_post_norm, self.scale))

    def _fed(self, x: Tensor, mixed: Tensor) -> Tensor:
        assert self.mlp is not None
        return self.mlp(x, self.mlp_norm, Residual(mixed, self.mlp_post_norm, self.scale))

    @cached_property
    def _joining(self) -> tuple[JoiningMixer, Sublayers] | None:
        """The mixer and what waits of it, where it is one of those that may wait in a run."""
        if not isinstance(self.mixer, JoiningMixer):
            return None
        half = self.mixer.half(self.mixer_norm, self.mixer_post_norm, self.scale)
        return None if half is None else (self.mixer, half)

    @cached_property
    def _feed_forward(self) -> ops.MLPSublayer | ops.MoESublayer | None:
        """The feed-forward part, where it is."""
        if not isinstance(self.mlp, (MLP, MixtureOfExperts)):
            return None
        return self.mlp.half(self.mlp_norm, self.mlp_post_norm, self.scale, self.parallel)


def new_layers(blocks: Iterable[Block], layouts: Iterable[Layout]) -> list[LayerState]:
    """A layer state for each block."""
    layers: list[LayerState] = []
    for block, layout in zip(blocks, layouts):
        reads = block.mixer.reads if isinstance(block.mixer, Attention) else None
        if reads is None:
            layers.append(block.mixer.new_state(layout))
        else:
            source = layers[reads]
            assert isinstance(source, KeyValueState)
            layers.append(SharedState(source))
    return layers


def run_blocks(blocks: Sequence[Block], x: Tensor, step: Step, layers: Sequence[LayerState]) -> Tensor:
    """The blocks one after the other, x float32 `[R, T, E]` -> `[R, T, E]`."""
    run = ops.Run(x, step.starts_t, step.counts_t)
    if not run.native or not _repeated(run, blocks, step, layers):
        for block, memory in zip(blocks, layers):
            block.join(run, step, memory)
        if run.native:
            _keep(run, blocks, step, layers)
    return run.stream()


class _Kept(NamedTuple):
    """What blocks did in the last step of a state, where every part of them waited."""

    blocks: tuple[Block, ...]
    chain: ops.Chain
    turners: list[JoiningMixer]  # of which each gives one of the chain's rotations


_kept: WeakKeyDictionary[LayerState, _Kept] = WeakKeyDictionary()  # of a state's first layer


def _repeated(run: ops.Run, blocks: Sequence[Block], step: Step, layers: Sequence[LayerState]) -> bool:
    """Have all parts wait as in the step before; False where that does not hold any more."""
    kept, members = (_kept.get(layers[0]) if layers else None), _members(layers)
    if kept is None or len(kept.blocks) != len(blocks) or not all(map(is_, kept.blocks, blocks)):
        return False
    folds = [memory for memory in members if isinstance(memory, RecurrentState)]
    carries = [carry for memory in folds if (carry := memory.single_scan_carry(step))]
    rings = [ring for memory in members if isinstance(memory, KeyValueState) and (ring := memory.rings(step))]
    rotations = [one for turner in kept.turners if (one := turner.rotation(step))]
    folded = run.repeats(kept.chain, rings, carries, rotations)
    for memory, each in zip(folds, folded or ()):
        memory.record(step, *each)
    return folded is not None


def _members(layers: Sequence[LayerState]) -> list[LayerState]:
    """What attends or folds alone: the layer states, and of one that does both its members."""
    members: list[LayerState] = []
    for memory in layers:
        if isinstance(memory, CompositeState) and not isinstance(memory, KeyValueState):
            members += memory.members
        else:
            members.append(memory)
    return members


def _keep(run: ops.Run, blocks: Sequence[Block], step: Step, layers: Sequence[LayerState]) -> None:
    """Remember the chain that waits, if all parts of the blocks are in it."""
    chain = run.chain()
    if chain is None or not layers or len(chain.rings) + len(chain.folds) != len(_members(layers)):
        return
    mixers = [block.mixer for block in blocks if isinstance(block.mixer, JoiningMixer)]
    turners = {id(mixer.rotation(step)): mixer for mixer in mixers}
    _kept[layers[0]] = _Kept(tuple(blocks), chain, [turners[id(rotation)] for rotation in chain.rotations])
