"""The state of latent attention: what keys and values are made of, instead of them (DeepSeek-V2, 2405.04434)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lmstate import ops
from lmstate.ops.attention.attend_latent import attend_latent
from lmstate.ops.types.block_table import BlockTable, Stored, dense
from lmstate.state.layers.base import Layout
from lmstate.state.layers.slots import SlotState
from lmstate.state.step import DeviceStep, Step


class LatentState(SlotState):
    """Compressed latents `[R, S, Lat]` and the rope key that all heads share, `[R, S, Dr]`."""

    kind = "latent"
    what = "latents and rope keys"
    observed = False
    """Whether it wants to know what is attended to: then nothing is expanded, and all goes through `attend`."""

    def __init__(
        self,
        layout: Layout,
        latent_dim: int,
        rope_dim: int,
        *,
        rotate_by: Callable[[Tensor, int], Tensor] | None = None,
    ):
        """`rotate_by(keys [K, S, Dr], delta)` rotates rope keys as if each had stood `delta` positions farther on."""
        self.rotate_by = rotate_by
        super().__init__(layout, {"latent": (latent_dim,), "rope": (rope_dim,)}, window_span=None)

    def store(self, latent: Tensor, rope_key: Tensor, step: Step) -> None:
        """Store the new tokens' latents `[R, T, Lat]` and rotated rope keys `[R, T, Dr]`."""
        held = (self.stored("latent"), self.stored("rope"))  # one "head" each
        ops.append(latent[:, :, None], rope_key[:, :, None], *held, step.starts_t, step.counts_t)

    def starts(self, step: Step) -> Tensor:
        """int64 [R]: where the step's first tokens lie in what is stored."""
        return step.starts_t

    def extent(self, step: Step) -> int:
        """S': how many positions a step's attention passes over."""
        return self.stored("latent").shape[2] if isinstance(step, DeviceStep) else max(step.ends, default=0)

    def latents(self, step: Step) -> tuple[Tensor, Tensor]:
        """Latents `[R, S', Lat]` and rope keys `[R, S', Dr]` of all positions up to the step's end, position p at p."""
        end = self.extent(step)
        latent, rope_key = (dense(self.stored(name))[:, 0, :end] for name in ("latent", "rope"))
        return latent, rope_key

    def moved(self, name: str, stored: Tensor, delta: int) -> Tensor:
        return stored if name != "rope" or self.rotate_by is None else self.rotate_by(stored[None], delta)[0].to(stored)

    def attend_latents(self, q_latent: Tensor, q_rope: Tensor, step: Step, *, scale: float) -> Tensor:
        """Attend to the latents themselves: q `[R, T, H, Lat]` and `[R, T, H, Dr]` -> float32 `[R, T, H, Lat]`."""
        latent, rope_key = (_one_head(self.stored(name)) for name in ("latent", "rope"))
        return attend_latent(q_latent, q_rope, latent, rope_key, step.starts_t, step.counts_t, scale=scale)


def _one_head(x: Stored) -> Stored:
    return x if isinstance(x, BlockTable) else x[:, 0]
