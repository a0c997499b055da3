"""The state of latent attention: what keys and values are made of, instead of them (DeepSeek-V2, 2405.04434)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from lmstate import ops
from lmstate.ops.attention.attend_latent import attend_latent
from lmstate.ops.attention.choose import attend_chosen, choose_positions
from lmstate.ops.types.block_table import BlockTable, Stored, dense
from lmstate.state.layers.base import Layout
from lmstate.state.layers.slots import SlotState
from lmstate.state.step import DeviceStep, Step

Shift = Callable[[Tensor, int], Tensor]


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
        rotate_by: Shift | None = None,
        beside: Mapping[str, tuple[int, ...]] | None = None,
        window: int | None = None,
    ):
        """`rotate_by(keys [K, S, Dr], delta)` rotates rope keys as if each had stood `delta` positions farther on.

        `beside`: widths of more buffers, as in `SlotState`. `window`: how many positions a query sees, its own
        included.
        """
        self.rotate_by = rotate_by
        span = self.windowed(window, layout)
        super().__init__(layout, {"latent": (latent_dim,), "rope": (rope_dim,), **(beside or {})}, window_span=span)

    def windowed(self, window: int | None, layout: Layout) -> int | None:
        """Take a window; the positions that it needs, those that a rewind brings in sight included."""
        self.window = window
        if window is None:
            return None
        self.kind = "latent window"
        return window - 1 + layout.rewind

    def lowest(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

    def store(self, latent: Tensor, rope_key: Tensor, step: Step) -> None:
        """Store the new tokens' latents `[R, T, Lat]` and rotated rope keys `[R, T, Dr]`."""
        held = (self.stored("latent"), self.stored("rope"))  # one "head" each
        ops.append(latent[:, :, None], rope_key[:, :, None], *held, step.starts_t, step.counts_t)

    def starts(self, step: Step) -> Tensor:
        """int64 [R]: where the step's first tokens are in what is stored."""
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

    def attend_latents(
        self, q_latent: Tensor, q_rope: Tensor, step: Step, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend to the latents themselves: q `[R, T, H, Lat]` and `[R, T, H, Dr]` -> float32 `[R, T, H, Lat]`."""
        latent, rope_key = (_one_head(self.stored(name)) for name in ("latent", "rope"))
        return attend_latent(
            q_latent, q_rope, latent, rope_key, step.starts_t, step.counts_t, scale=scale, window=self.window,
            sinks=sinks,
        )  # fmt: skip

    def attend_chosen(
        self, q_latent: Tensor, q_rope: Tensor, chosen: Tensor, step: Step, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """The same to chosen positions `[R, T, k]` alone, see `choose_positions`."""
        return attend_chosen(
            q_latent, q_rope, self.stored("latent"), self.stored("rope"), chosen, scale=scale, sinks=sinks
        )


class IndexKeys(SlotState):
    """Beside what a layer stores, a small key of each position, `[R, S, Di]`, by which positions are chosen."""

    kind = "indexed latent"
    rotate_index_by: Shift

    def store_index(self, keys: Tensor, step: Step) -> None:
        """Store the new tokens' rotated keys `[R, T, Di]`."""
        self.store_one("index", keys.detach(), step)

    def choose(self, q: Tensor, weights: Tensor, budget: int, step: Step) -> Tensor:
        """Positions `[R, T, k]` for queries `[R, T, Hi, Di]` with weights `[R, T, Hi]`: see `choose_positions`."""
        return choose_positions(q, weights, self.stored("index"), step.starts_t, step.counts_t, budget)

    def moved(self, name: str, stored: Tensor, delta: int) -> Tensor:
        if name == "index":
            return self.rotate_index_by(stored[None], delta)[0].to(stored)
        return super().moved(name, stored, delta)


class IndexedLatentState(IndexKeys, LatentState):
    """Latents, rope keys and the keys of an index."""

    what = "latents, rope keys and index keys"

    def __init__(
        self,
        layout: Layout,
        latent_dim: int,
        rope_dim: int,
        index_dim: int,
        *,
        rotate_by: Shift | None,
        rotate_index_by: Shift,
    ):
        """The arguments are those of `LatentState`; `rotate_index_by`: the same of index keys `[K, S, Di]`."""
        self.rotate_index_by = rotate_index_by
        super().__init__(layout, latent_dim, rope_dim, rotate_by=rotate_by, beside={"index": (index_dim,)})


def _one_head(x: Stored) -> Stored:
    return x if isinstance(x, BlockTable) else x[:, 0]
