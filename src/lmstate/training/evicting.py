"""Layer states of a chunked text under policies that evict: each chunk sees what the policy had kept when it came.

Forward, a state as generation has it attends and evicts, and which slots it holds at each border between chunks is
noted. Backward these are constants: a chunk reads the noted positions of all keys and values, which are kept with their
gradients, and nothing flows through the choice.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops.types.params import FULL_CAUSAL, AttentionParams, CausalMask
from lmstate.state import AttentionState, LatentState, Layout, Step
from lmstate.state.changes import Changes
from lmstate.state.kv.eviction.attention import EvictingState
from lmstate.state.kv.eviction.latent import EvictingLatentState
from lmstate.training.past import Past, whole_text


class Evictions:
    """Slots that a policy keeps, by border between chunks.

    `kept`: for each chunk the positions that it finds, int64 `[R, K, M]`, -1 where a head has fewer than others.
    """

    def __init__(self, state: EvictingState, size: int) -> None:
        self.state, self.size = state, size
        self.kept: list[Tensor] = []
        self.replays = False
        self._chunk = 0
        self._step: Step | None = None  # that the state has not committed yet

    def enter(self, chunk: int) -> None:
        """Start a chunk: the first time, or with autograd on, once more."""
        self.replays, self._chunk = torch.is_grad_enabled(), chunk
        if self.replays:
            return
        if self._step is not None:
            changes = Changes()
            self.state.commit(self._step, self._step.counts, changes)
            changes.apply()
            self._step = None
        where = torch.where(self.state.slot_store.filled(), self.state.arrays["position"], -1).long()
        most = int((where >= 0).sum(-1).max()) if where.numel() else 0
        self.kept.append(where.sort(-1, descending=True).values[..., :most])

    def reserve(self, step: Step) -> None:
        self.state.reserve(step)
        self._step = step

    @property
    def start(self) -> int:
        """Position of the chunk's first token."""
        return self._chunk * self.size

    @property
    def found(self) -> Tensor:
        """The positions that the chunk finds."""
        return self.kept[self._chunk]


class StreamEvicting(AttentionState):
    """Keys and values of every position `[R, K, S, D]`, of which a chunk sees those that `state`'s policy kept."""

    def __init__(self, layout: Layout, state: EvictingState) -> None:
        heads, (k, v) = state.arrays["k"].shape[1], (state.arrays[name].shape[-1] for name in "kv")
        super().__init__(replace(layout, capacity=1), heads, k, v)
        self.mask = state.mask
        self.past = Past(*whole_text(self.buffers.values(), layout))
        self.evictions = Evictions(state, layout.chunk)
        self._again: tuple[Tensor, Tensor] | None = None

    def enter(self, chunk: int) -> None:
        self.evictions.enter(chunk)

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
        evictions = self.evictions
        if rotation is not None:
            q = ops.rope(q, *rotation)
        if new is not None:
            new = new if rotation is None else (ops.rope(new[0], *rotation), new[1])
            k, v = (part.transpose(1, 2).to(self.layout.dtype) for part in new)  # [R, K, T, D]
            self._again = self.past.received(k, v, evictions.start)
        if not evictions.replays:
            if new is not None:
                evictions.reserve(step)
            return evictions.state.attend(q, new, step, params)
        assert self._again is not None
        keys, values = self.past.gathered(*self._again, evictions.found)
        return attend_kept(q, keys, values, evictions.found, evictions.start, params, self.mask)

    def clear(self) -> None:
        """Let go of what a chunk's graph held."""
        self._again = None


class StreamEvictingLatents(LatentState):
    """Latents and rope keys of every position, of which a chunk sees those that `state`'s policy kept."""

    observed = True  # it attends by itself: nothing is expanded

    def __init__(self, layout: Layout, state: EvictingLatentState) -> None:
        latent, rope = (state.arrays[name].shape[-1] for name in "kv")
        super().__init__(replace(layout, capacity=1), latent, rope)
        self.past = Past(*(part[:, None] for part in whole_text(self.buffers.values(), layout)))
        self.evictions, self.state = Evictions(state, layout.chunk), state
        self._again: tuple[Tensor, Tensor] | None = None

    def enter(self, chunk: int) -> None:
        self.evictions.enter(chunk)

    def store(self, latent: Tensor, rope_key: Tensor, step: Step) -> None:
        new, key = (part[:, None].to(self.layout.dtype) for part in (latent, rope_key))  # [R, 1, T, Lat]
        self._again = self.past.received(new, key, self.evictions.start)
        if not self.evictions.replays:
            self.evictions.reserve(step)
            self.state.store(latent, rope_key, step)

    def attend_latents(
        self, q_latent: Tensor, q_rope: Tensor, step: Step, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        evictions = self.evictions
        if not evictions.replays:
            return self.state.attend_latents(q_latent, q_rope, step, scale=scale, sinks=sinks)
        assert self._again is not None
        latent, rope = self.past.gathered(*self._again, evictions.found)
        q, keys = torch.cat([q_latent, q_rope], dim=-1), torch.cat([latent, rope], dim=-1)
        return attend_kept(
            q, keys, latent, evictions.found, evictions.start, AttentionParams(scale, sinks=sinks), FULL_CAUSAL
        )

    def clear(self) -> None:
        """Let go of what a chunk's graph held."""
        self._again = None


def attend_kept(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, start: int, params: AttentionParams, mask: CausalMask
) -> Tensor:
    """Attention of a chunk to the kept slots and to itself, float32 `[R, T, H, Dv]`. q is `[R, T, H, D]` from position
    `start` on; k and v are `[R, K, M + T, D]`, of which the first M are at the positions kept `[R, K, M]`.
    """
    own = torch.arange(start, start + q.shape[1], device=q.device)
    positions = torch.cat([kept, own.expand(*kept.shape[:2], -1)], dim=-1)[:, :, None]  # [R, K, 1, M + T]
    of_keys = mask.visible(own[:, None], positions), own[:, None] - positions  # [R, K, T, M + T] each
    group = q.shape[2] // k.shape[1]
    visible, distance = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in of_keys)
    seen = params.softmax(q.transpose(1, 2).to(k.dtype), k, v, visible, distance)
    return seen.transpose(1, 2).float()
