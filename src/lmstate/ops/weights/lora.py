"""A weight with products of low rank beside it (LoRA, Hu et al. 2021): `W x + scale * B A x`, W as it is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate.errors import UnsupportedError
from lmstate.ops.types.weight import Weight


@dataclass(frozen=True, eq=False)
class LowRank:
    """Low-rank update of the outputs `first .. first + n - 1` of a weight: `scale * up @ down`."""

    first: int
    down: Weight  # [rank, K]
    up: Weight  # [n, rank]
    scale: float

    @property
    def last(self) -> int:
        return self.first + self.up.out_features

    def dense(self) -> Tensor:
        """The matrix itself, float32 `[n, K]`."""
        return self.up.dequantize() @ self.down.dequantize() * self.scale


Updates = tuple[LowRank, ...]
"""Those of one adapter in one weight, none of which overlap, in the order of their outputs."""


class LoraWeight(Weight):
    """`base` with the updates of one adapter, or of one for each row of the batch (none: the base alone).

    Native bodies know no such weight: `storage` tells them so by lying on no device that they know.
    """

    kind = "lora"

    def __init__(self, base: Weight, rows: Sequence[Updates], order: Tensor | None = None) -> None:
        """`rows`: the updates of each row; of all rows, if there is one. `order` int64 `[N]`: of the base's outputs
        beside those of the updates."""
        self.base, self.each, self.order = base, tuple(rows), order
        self.storage = torch.empty(0, device="meta")
        self.out_features, self.in_features = base.shape

    def add_to(self, linear: Callable[[Tensor, Weight], Tensor], y: Tensor, x: Tensor) -> Tensor:
        """y `[..., N]`, what the base gives for x `[..., K]`, with the updates in it."""
        if len(self.each) == 1:
            return y + self._update(linear, x, self.each[0]) if self.each[0] else y
        if x.ndim != 3 or len(x) != len(self.each):
            raise UnsupportedError(
                f"adapters for each of {len(self.each)} rows met a product of shape {list(x.shape)}: give the state as "
                "many rows; experts, which see the tokens of all rows together, have one adapter for all of them"
            )
        added = torch.zeros_like(y)
        for updates in {id(own): own for own in self.each if own}.values():
            rows = [row for row, own in enumerate(self.each) if own is updates]
            added[rows] = self._update(linear, x[rows], updates)
        return y + added

    def _update(self, linear: Callable[[Tensor, Weight], Tensor], x: Tensor, updates: Updates) -> Tensor:
        parts, at = [], 0
        for update in updates:
            parts.append(x.new_zeros(*x.shape[:-1], update.first - at))
            parts.append(linear(linear(x, update.down), update.up) * update.scale)
            at = update.last
        whole = torch.cat([*parts, x.new_zeros(*x.shape[:-1], self.out_features - at)], dim=-1)
        return whole if self.order is None else whole[..., self.order]

    def merged(self) -> Tensor:
        """The sum as one matrix, float32 `[N, K]`; there is one adapter for all rows."""
        (updates,) = self.each
        added = torch.zeros(self.shape)
        for update in updates:
            added[update.first : update.last] = update.dense()
        return self.base.dequantize() + (added if self.order is None else added[self.order])

    def dequantize(self, dtype: torch.dtype = torch.float32, first: int = 0, count: int | None = None) -> Tensor:
        last = self.out_features if count is None else first + count
        return self.merged()[first:last].to(dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self.base.rows(ids)

    def tensors(self) -> dict[str, Tensor]:
        held = dict(self.base.tensors())
        for row, updates in enumerate(self.each):
            for update in updates:
                for name, part in (("down", update.down), ("up", update.up)):
                    held |= {f"{row}.{update.first}.{name}.{n}": t * update.scale for n, t in part.tensors().items()}
        return held

    def to(self, device: torch.device | str) -> Weight:
        raise UnsupportedError("a weight with adapters stays where it is: move the model before it gets them")

    @property
    def nbytes(self) -> int:
        own = {id(u): u.down.nbytes + u.up.nbytes for updates in self.each for u in updates}
        return self.base.nbytes + sum(own.values())

    @property
    def device(self) -> torch.device:
        return self.base.device
