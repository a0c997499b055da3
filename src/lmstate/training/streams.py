"""Layer states for a text that is fed in chunks, once forward and once backward, with gradients across the chunks.

Forward, without gradients, they keep what a later chunk reads: keys, values or latents of the whole text, and the carry
of each scan at every border between chunks. Backward, from the last chunk to the first, a chunk is computed again with
autograd on. The data that it reads of earlier chunks is then a leaf, whose gradient is kept and comes back in when the
chunk that made it has its turn. All rows start at position 0, so a chunk has the same positions in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import UnsupportedError
from lmstate.models.block import Block, new_layers
from lmstate.ops import ScanStart
from lmstate.ops.attention.attend_latent import attend_latent
from lmstate.ops.attention.choose import attend_chosen, choose_positions
from lmstate.state import (
    AttentionState,
    CompositeState,
    IndexKeys,
    LatentState,
    LayerState,
    Layout,
    RecurrentState,
    SharedState,
    Step,
)
from lmstate.state.kv.eviction.attention import EvictingState
from lmstate.state.kv.eviction.latent import EvictingLatentState
from lmstate.state.kv.policies.base import Evicting
from lmstate.state.kv.policies.per_layer import Policies, policies_of
from lmstate.state.kv.policies.storage import Dense
from lmstate.state.layers.base import Policy
from lmstate.state.layers.latent import IndexedLatentState
from lmstate.state.layers.scans import Carry
from lmstate.training.evicting import StreamEvicting, StreamEvictingLatents
from lmstate.training.past import Past, attend_past, whole_text


class StreamAttention(AttentionState):
    """Keys and values of every position `[R, K, S, D]`, S the text's length; those of a window are kept as well."""

    def __init__(self, layout: Layout, like: AttentionState) -> None:
        keys, values = like.buffers["k"], like.buffers["v"]
        super().__init__(layout, keys.heads[0], keys.width, values.width)
        self.mask = like.mask
        self.past = Past(*whole_text(self.buffers.values(), layout))
        self._again: tuple[Tensor, Tensor] | None = None

    def view(self, step: Step) -> ops.KVView | None:
        return None

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        params: ops.AttentionParams,
        rotation: ops.RopeTables | None = None,
    ) -> Tensor:
        start = start_of(step)
        if rotation is not None:
            q = ops.rope(q, *rotation)
        if new is not None:
            k, v = new if rotation is None else (ops.rope(new[0], *rotation), new[1])
            k, v = (part.transpose(1, 2).to(self.layout.dtype) for part in (k, v))  # [R, K, T, D]
            self._again = self.past.received(k, v, start)
        assert self._again is not None
        return attend_past(q, *self._again, self.past, start, params, self.mask)

    def nbytes(self) -> int:
        return self.past.k.nbytes + self.past.v.nbytes

    def clear(self) -> None:
        """Let go of what a chunk's graph held."""
        self._again = None


class StreamLatents(LatentState):
    """Latents `[R, S, Lat]` and rope keys `[R, S, Dr]` of every position."""

    def __init__(self, layout: Layout, like: LatentState) -> None:
        super().__init__(layout, like.buffers["latent"].width, like.buffers["rope"].width)
        self.window = like.window
        latents, rope_keys = whole_text(self.buffers.values(), layout)
        self.past = Past(latents[:, None], rope_keys[:, None])
        self._again: tuple[Tensor, Tensor] | None = None

    def store(self, latent: Tensor, rope_key: Tensor, step: Step) -> None:
        start = start_of(step)
        new, key = (part[:, None].to(self.layout.dtype) for part in (latent, rope_key))  # [R, 1, T, Lat]
        whole = self.past.joined(*self.past.received(new, key, start), 0, start)
        self._again = whole[0][:, 0], whole[1][:, 0]

    def latents(self, step: Step) -> tuple[Tensor, Tensor]:
        assert self._again is not None
        return self._again

    def extent(self, step: Step) -> int:
        return start_of(step) + step.width

    def attend_latents(
        self, q_latent: Tensor, q_rope: Tensor, step: Step, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return attend_latent(
            q_latent, q_rope, *self.latents(step), step.starts_t, step.counts_t, scale=scale, window=self.window,
            sinks=sinks,
        )  # fmt: skip

    def attend_chosen(
        self, q_latent: Tensor, q_rope: Tensor, chosen: Tensor, step: Step, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        latent, rope_key = (part[:, None] for part in self.latents(step))
        return attend_chosen(q_latent, q_rope, latent, rope_key, chosen, scale=scale, sinks=sinks)

    def nbytes(self) -> int:
        return self.past.k.nbytes + self.past.v.nbytes

    def clear(self) -> None:
        """Let go of what a chunk's graph held."""
        self._again = None


class StreamIndexedLatents(StreamLatents, IndexKeys):
    """The same, with the keys of an index `[R, 1, S, Di]`, through which no gradient goes."""

    def __init__(self, layout: Layout, like: IndexedLatentState) -> None:
        super().__init__(layout, like)
        (self.keys,) = whole_text([like.buffers["index"]], layout)

    def store_index(self, keys: Tensor, step: Step) -> None:
        start = start_of(step)
        self.keys[:, start : start + step.width] = keys.detach()

    def choose(self, q: Tensor, weights: Tensor, budget: int, step: Step) -> Tensor:
        stored = self.keys[:, None, : self.extent(step)]
        return choose_positions(q, weights, stored, step.starts_t, step.counts_t, budget)

    def nbytes(self) -> int:
        return super().nbytes() + self.keys.nbytes


class StreamCarry(RecurrentState):
    """The carry of every row at each border between chunks."""

    def __init__(self, layout: Layout, like: RecurrentState) -> None:
        shapes = [part.shape[1:] for part in like.carry]
        super().__init__(replace(layout, rewind=0), like.scan, shapes, 0, names=like.names)
        self.borders: list[Carry] = []
        self._entry_carry, self._exit_carry = self.carry, self.carry

    def enter(self, chunk: int) -> None:
        """Start a chunk: from where the one before ended, or, with autograd on, from a leaf of the same numbers."""
        if torch.is_grad_enabled():
            self._entry_carry = tuple(part.detach().requires_grad_() for part in self.borders[chunk])
        else:
            self._entry_carry = self.carry if chunk == 0 else self._exit_carry
            self.borders.append(self._entry_carry)

    def advance(self, inputs: Tensor, step: Step, gate: Tensor | None = None) -> Tensor:
        outputs, self._exit_carry = self.scan(inputs, self._entry_carry, step.counts_t, gate)
        return outputs

    def fused_scan_start(self, step: Step) -> ScanStart:
        return ScanStart(self._entry_carry)

    def record(
        self, step: Step, inputs: Tensor, carry: Carry, marked: Carry | None = None, *, fused: bool = False
    ) -> None:
        self._exit_carry = carry

    def clear(self) -> None:
        """Let go of what a chunk's graph held."""
        self._entry_carry = self._exit_carry = self.carry

    @property
    def start(self) -> Carry:
        return self._entry_carry

    @property
    def end(self) -> Carry:
        return self._exit_carry


def start_of(step: Step) -> int:
    """Start position of a step's chunk, the same in every row that takes part in it."""
    return max(start for start, count in zip(step.starts, step.counts) if count)


def stream_layers(blocks: Sequence[Block], layout: Layout, kv: Policies | None = None) -> list[LayerState]:
    """Layer states of blocks for texts of up to `layout.capacity` tokens; `kv`: what they forget, see `loss`."""
    known: dict[int, LayerState] = {}
    return [_stream(made, layout, known) for made in _small(blocks, layout, kv)]


def follow(layers: Sequence[LayerState], blocks: Sequence[Block], layout: Layout) -> None:
    """Rebind the scans to other blocks: the same model, built again."""
    pairs = zip(simple(layers), simple(_small(blocks, layout)), strict=True)
    for own, other in pairs:
        if isinstance(own, RecurrentState):
            assert isinstance(other, RecurrentState)
            own.scan = other.scan


def simple(layers: Sequence[LayerState]) -> list[LayerState]:
    """The parts of layers that hold something."""
    return [part for layer in layers for part in layer.leaves()]


def _small(blocks: Sequence[Block], layout: Layout, kv: Policies | None = None) -> list[LayerState]:
    policies: list[Evicting | None] = [None] * len(blocks)
    if kv is not None:
        policies = [exact(policy, layer) for layer, policy in enumerate(policies_of(kv, len(blocks)))]
    return new_layers(blocks, [replace(layout, capacity=1, rewind=0, kv=policy) for policy in policies])


def exact(policy: Policy, layer: int) -> Evicting | None:
    """The policy of a layer that evicts; None if it keeps all. Raises `UnsupportedError` for one that rounds."""
    storage = policy.storage if isinstance(policy, Evicting) else policy
    if storage != Dense():
        raise UnsupportedError(
            f"{policy} was asked for in training, for layer {layer}; gradients cannot pass what it rounds: evict with "
            "Dense() storage, which is the default of policies with a budget"
        )
    return policy if isinstance(policy, Evicting) else None


def _stream(made: LayerState, layout: Layout, known: dict[int, LayerState]) -> LayerState:
    stream: LayerState
    if isinstance(made, SharedState):
        source = known[id(made.source)]
        assert isinstance(source, StreamAttention | StreamEvicting)
        stream = SharedState(source)
    elif type(made) is AttentionState:
        stream = StreamAttention(layout, made)
    elif isinstance(made, IndexedLatentState):
        stream = StreamIndexedLatents(layout, made)
    elif type(made) is LatentState:
        stream = StreamLatents(layout, made)
    elif isinstance(made, EvictingLatentState):
        stream = StreamEvictingLatents(layout, made)
    elif isinstance(made, EvictingState):
        stream = StreamEvicting(layout, made)
    elif isinstance(made, RecurrentState):
        stream = StreamCarry(layout, made)
    elif type(made) is CompositeState:
        stream = CompositeState([_stream(member, layout, known) for member in made.members])
    else:
        raise UnsupportedError(f"a {made.kind} layer, {type(made).__name__}, cannot be trained in chunks")
    known[id(made)] = stream
    return stream
