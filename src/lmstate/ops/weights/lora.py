"""A weight with products of low rank beside it (LoRA, Hu et al. 2021): `W x + scale * B A x`, W as it is stored.

With magnitudes m (DoRA, Liu et al. 2024): `m * V x / |V|`, V = W + scale * B A, where the norm is that of each row
of V, and constant to gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.errors import UnsupportedError
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.grouped import FloatWeight


class Magnitude:
    """The magnitudes of a matrix's outputs, float32 `[n]`."""

    def __init__(self, storage: Tensor) -> None:
        self.storage = storage


@dataclass(frozen=True, eq=False)
class LowRank:
    """Low-rank update of the outputs `first .. first + n - 1` of a weight: `scale * up @ down`."""

    first: int
    down: FloatWeight  # [rank, K]
    up: FloatWeight  # [n, rank]
    scale: float
    magnitude: Magnitude | None = None

    @property
    def last(self) -> int:
        return self.first + self.up.out_features

    def parts(self) -> list[Tensor]:
        """The tensors that it is made of."""
        parts = [self.down.storage, self.up.storage]
        return parts if self.magnitude is None else [*parts, self.magnitude.storage]

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that are equal where updates are."""
        held = {"down": self.down.storage * self.scale, "up": self.up.storage * self.scale}
        return held if self.magnitude is None else {**held, "magnitude": self.magnitude.storage}


Updates = tuple[LowRank, ...]
"""Those of one adapter in one weight, none of which overlap, in the order of their outputs."""
Linear = Callable[..., Tensor]


class _Joined(NamedTuple):
    """Updates of one weight as one: `factor * (W + up @ down)`, and what they were made of."""

    down: FloatWeight  # [sum of ranks, K]
    up: FloatWeight  # [N, sum of ranks], zero where an update has no part
    norm: Tensor | None  # [N], of the rows of W + up @ down, if there are magnitudes
    factor: Tensor | None  # [N]
    sources: tuple[Tensor, ...]
    versions: tuple[tuple[int, int], ...]


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
        self._known: dict[int, _Joined] = {}

    def product(self, linear: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        """float32 `[..., N]` for x `[..., K]`; `linear` multiplies with any weight."""
        if len(self.each) == 1:
            return self._product(linear, x, bias, self.each[0], None)
        if x.ndim != 3 or len(x) != len(self.each):
            raise UnsupportedError(
                f"adapters for each of {len(self.each)} rows met a product of shape {list(x.shape)}: give the state as "
                "many rows; experts, which see the tokens of all rows together, have one adapter for all of them"
            )
        plain = linear(x, self.base, bias)
        y = plain.clone()
        for updates in {id(own): own for own in self.each if own}.values():
            rows = [row for row, own in enumerate(self.each) if own is updates]
            y[rows] = self._product(linear, x[rows], bias, updates, plain[rows])
        return y

    def _product(self, linear: Linear, x: Tensor, bias: Tensor | None, updates: Updates, y: Tensor | None) -> Tensor:
        """`product` with one adapter; y: what the base gives, bias and all, if that is known."""
        if not updates:
            return linear(x, self.base, bias) if y is None else y
        down, up, factor = self._joined(updates)
        if y is None or (factor is not None and bias is not None):
            y = linear(x, self.base, bias if factor is None else None)
        y = y + linear(linear(x, down), up)
        if factor is None:
            return y
        return y * factor if bias is None else y * factor + bias

    def _joined(self, updates: Updates) -> tuple[FloatWeight, FloatWeight, Tensor | None]:
        """The updates as one. It is kept until an optimizer writes into them."""
        sources = tuple(tensor for update in updates for tensor in update.parts())
        versions = tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in sources)
        known = self._known.get(id(updates))
        if known is None or known.versions != versions:
            with torch.no_grad():
                down, up = self._stacked(updates)
                norm = self._norm(down, up) if any(update.magnitude for update in updates) else None
                factor = None if norm is None else self._factor(updates, norm)
            known = _Joined(FloatWeight(down), FloatWeight(up), norm, factor, sources, versions)
            self._known[id(updates)] = known
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in sources):
            return known.down, known.up, known.factor
        down, up = self._stacked(updates)
        return FloatWeight(down), FloatWeight(up), None if known.norm is None else self._factor(updates, known.norm)

    def _stacked(self, updates: Updates) -> tuple[Tensor, Tensor]:
        """down `[ranks, K]` and up `[N, ranks]`, scaled, whose product is the sum of all updates."""
        down = torch.cat([update.down.storage for update in updates])
        parts, at, rank = [], 0, 0
        for update in updates:
            beside = len(down) - rank - update.up.in_features
            parts.append(down.new_zeros(update.first - at, len(down)))
            parts.append(F.pad(update.up.storage * update.scale, (rank, beside)))
            at, rank = update.last, rank + update.up.in_features
        up = torch.cat([*parts, down.new_zeros(self.out_features - at, len(down))])
        return down, up if self.order is None else up[self.order]

    def _norm(self, down: Tensor, up: Tensor) -> Tensor:
        return torch.linalg.vector_norm(self.base.dequantize() + up @ down, dim=1).clamp(min=1e-30)

    def _factor(self, updates: Updates, norm: Tensor) -> Tensor:
        """Factor of each output, `[N]`: 1 where no update has a magnitude."""
        magnitudes, where = [], []
        for update in updates:
            if update.magnitude is not None:
                magnitudes.append(update.magnitude.storage)
                where.append(torch.arange(update.first, update.last, device=norm.device))
        places = torch.cat(where)
        if self.order is not None:
            places = self.order.argsort()[places]  # of the updates' outputs among the base's
        return torch.ones_like(norm).index_put((places,), torch.cat(magnitudes) / norm[places])

    def merged(self) -> Tensor:
        """The sum as one matrix, float32 `[N, K]`; there is one adapter for all rows."""
        (updates,) = self.each
        down, up, factor = self._joined(updates)
        whole = self.base.dequantize() + up.dequantize() @ down.dequantize()
        return whole if factor is None else whole * factor[:, None]

    def dequantize(self, dtype: torch.dtype = torch.float32, first: int = 0, count: int | None = None) -> Tensor:
        last = self.out_features if count is None else first + count
        return self.merged()[first:last].to(dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self.base.rows(ids)

    def tensors(self) -> dict[str, Tensor]:
        held = dict(self.base.tensors())
        for row, updates in enumerate(self.each):
            for update in updates:
                held |= {f"{row}.{update.first}.{name}": tensor for name, tensor in update.tensors().items()}
        return held

    def to(self, device: torch.device | str) -> Weight:
        raise UnsupportedError("a weight with adapters stays where it is: move the model before it gets them")

    @property
    def nbytes(self) -> int:
        own = {id(u): sum(part.nbytes for part in u.parts()) for updates in self.each for u in updates}
        return self.base.nbytes + sum(own.values())

    @property
    def device(self) -> torch.device:
        return self.base.device
