"""The state of latent attention that forgets: one list of slots serves all heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lmstate.ops.attention.attend_latent import attend_latent
from lmstate.ops.types.params import AttentionSums
from lmstate.state.gradients import refused
from lmstate.state.kv.eviction.attention import LOSS, EvictingState
from lmstate.state.kv.eviction.slot_store import Arrays
from lmstate.state.kv.policies.base import Evicting
from lmstate.state.layers.base import Layout
from lmstate.state.step import Step


class EvictingLatentState(EvictingState):
    """`LatentState` over lists of slots, one a row: "k" holds the latents, "v" the rope keys.

    To a policy a slot's key is its latent and its rope key side by side, as queries see it that were folded through the
    key projections; its value is the latent, which the value projections read. Attention is averaged over all heads.
    """

    rotated = "v"

    def __init__(
        self,
        layout: Layout,
        policy: Evicting,
        latent_dim: int,
        rope_dim: int,
        *,
        rotate_by: Callable[[Tensor, int], Tensor] | None = None,
        heads: int,
        scale: float,
    ):
        super().__init__(
            layout, policy, 1, latent_dim, rope_dim, rotate_by=rotate_by, heads=heads, scale=scale,
            query_dim=latent_dim + rope_dim,
        )  # fmt: skip
        self.kind, self.latent_dim = "latent", latent_dim
        self._cut = False  # whether a gradient through the step is lost

    @property
    def observed(self) -> bool:
        return self.history > 0 or self.queries is not None

    def store(self, latent: Tensor, rope_key: Tensor, step: Step) -> None:
        self._cut = self._loses(step, latent, rope_key)
        self._enter(step)
        self._store((latent[:, :, None], rope_key[:, :, None]), step)

    def starts(self, step: Step) -> Tensor:
        return self._enter(step).starts

    def extent(self, step: Step) -> int:
        return max(self.slot_store.most) + step.width

    def latents(self, step: Step) -> tuple[Tensor, Tensor]:
        latent, rope_key = (self.codec.transform(x[:, 0, : self.extent(step)]) for x in self.codec.decode(self.arrays))
        return (refused(latent, LOSS), refused(rope_key, LOSS)) if self._cut else (latent, rope_key)

    def attend_latents(
        self, q_latent: Tensor, q_rope: Tensor, step: Step, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """`LatentState.attend_latents`."""
        chunk = self._enter(step)
        latent, rope_key = self.latents(step)
        if self.queries is not None:
            chunk.queries = torch.cat([q_latent, q_rope], dim=-1).detach().float().contiguous()
        sums = columns = None
        if chunk.columns is not None:
            sums = chunk.columns.zero_()[..., : latent.shape[1]]
            columns = AttentionSums(sums.new_zeros(sums.shape), chunk.starts + chunk.counts)
        seen = attend_latent(
            q_latent,
            q_rope,
            latent,
            rope_key,
            chunk.starts,
            chunk.counts,
            scale=scale,
            columns=columns,
            sinks=sinks,
        )
        if sums is not None and columns is not None:
            sums.copy_(columns.sums)
        return refused(seen, LOSS) if self._cut else seen

    def read(self, arrays: Arrays) -> tuple[Tensor, Tensor]:
        latent, rope_key = super().read(arrays)
        return torch.cat([latent, rope_key], dim=-1), latent

    def rotate(self, x: Tensor, delta: int) -> Tensor:
        latent, rope_key = x.split([self.latent_dim, x.shape[-1] - self.latent_dim], dim=-1)
        return torch.cat([latent, super().rotate(rope_key, delta)], dim=-1)
