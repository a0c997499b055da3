"""A weight with the updates of an adapter beside it, W as it is stored.

LoRA (Hu et al. 2021), LoHa (2108.06098) and LoKr (2212.10650) add products of small matrices: `W x + up @ down x`. With
magnitudes m (DoRA, Liu et al. 2024) it is `m * V x / |V|`, V = W + up @ down, where the norm is that of each row of V,
and constant to gradients. (IA)3 (2205.05638) multiplies inputs or outputs: `W (l * x)`, `l * (W x + bias)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.errors import UnsupportedError
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.grouped import FloatWeight


class AdapterTensor:
    """A tensor of an adapter, float32: an optimizer writes into it, and others may take its place."""

    def __init__(self, storage: Tensor) -> None:
        self.storage = storage


@dataclass(frozen=True, eq=False)
class Update(ABC):
    """A change of the outputs `first .. last - 1` of a weight, those of a module of `shape` `[n, K]`."""

    first: int
    shape: tuple[int, int]
    parts: Mapping[str, AdapterTensor]

    @property
    def last(self) -> int:
        return self.first + self.shape[0]

    def read(self, name: str) -> Tensor:
        """The part of that name."""
        return self.parts[name].storage

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Tensors that are equal where updates are."""


@dataclass(frozen=True, eq=False)
class Product(Update):
    """An update that adds `scale * up @ down` to a weight, and may have magnitudes."""

    scale: float

    @abstractmethod
    def matrices(self) -> tuple[Tensor, Tensor]:
        """down `[r, K]` and up `[n, r]`, without the scale."""

    @property
    def magnitude(self) -> Tensor | None:
        """Of each output, `[n]`."""
        return None

    def tensors(self) -> dict[str, Tensor]:
        down, up = self.matrices()
        held = {"down": down * self.scale, "up": up * self.scale}
        return held if self.magnitude is None else {**held, "magnitude": self.magnitude}


class LowRank(Product):
    """LoRA: down is A `[r, K]`, up is B `[n, r]`; and DoRA."""

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.read("lora_A"), self.read("lora_B")

    @property
    def magnitude(self) -> Tensor | None:
        part = self.parts.get("lora_magnitude_vector")
        return None if part is None else part.storage


class HadamardProduct(Product):
    """LoHa: the elementwise product of two matrices of rank r, which has rank r * r, or that of any matrix."""

    def matrices(self) -> tuple[Tensor, Tensor]:
        if len(self.read("hada_w1_b")) ** 2 > min(self.shape):
            pairs = ((self.read(f"hada_w{at}_a"), self.read(f"hada_w{at}_b")) for at in (1, 2))
            return _factors(torch.mul(*(left @ right for left, right in pairs)))
        ups = self.read("hada_w1_a")[:, :, None] * self.read("hada_w2_a")[:, None]  # [n, r, r]
        downs = self.read("hada_w1_b")[:, None] * self.read("hada_w2_b")[None]  # [r, r, K]
        return downs.flatten(0, 1), ups.flatten(1)


class KroneckerProduct(Product):
    """LoKr: the Kronecker product of w1 `[a, b]` and w2 `[c, d]`, each of which may be a product itself."""

    def matrices(self) -> tuple[Tensor, Tensor]:
        w1, (right, left) = self._first(), self._second()  # [a, b], [r, d], [c, r]
        ones = torch.eye(min(w1.shape), dtype=w1.dtype, device=w1.device)
        if w1.shape[0] < w1.shape[1]:
            return torch.kron(w1, right), torch.kron(ones, left)
        return torch.kron(ones, right), torch.kron(w1, left)

    def _first(self) -> Tensor:
        return self.read("lokr_w1") if "lokr_w1" in self.parts else self.read("lokr_w1_a") @ self.read("lokr_w1_b")

    def _second(self) -> tuple[Tensor, Tensor]:
        """w2 as `[r, d]` and `[c, r]`, r at most c and d."""
        if "lokr_w2" in self.parts:
            return _factors(self.read("lokr_w2"))
        left, right = self.read("lokr_w2_a"), self.read("lokr_w2_b")
        return (right, left) if len(right) <= min(len(left), right.shape[1]) else _factors(left @ right)


@dataclass(frozen=True, eq=False)
class Rescaling(Update):
    """(IA)3: a factor for each output, `[n, 1]`, or for each input, `[1, K]`."""

    of_inputs: bool

    @property
    def factors(self) -> Tensor:
        return self.read("ia3_l").flatten()

    def tensors(self) -> dict[str, Tensor]:
        return {"inner" if self.of_inputs else "outer": self.factors}


Updates = tuple[Update, ...]
"""Those of one adapter in one weight, all of one kind, none of which overlap, in the order of their outputs."""
Linear = Callable[..., Tensor]


class _Joined(NamedTuple):
    """Products of one weight as one: `factor * (W + up @ down)`, and what they were made of."""

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
        if rescalings := _rescalings(updates):
            return self._rescaled(rescalings, lambda factors: linear(_times(x, factors), self.base, bias), y)
        down, up, factor = self._joined(updates)
        if y is None or (factor is not None and bias is not None):
            y = linear(x, self.base, bias if factor is None else None)
        y = y + linear(linear(x, down), up)
        if factor is None:
            return y
        return y * factor if bias is None else y * factor + bias

    def _rescaled(
        self, updates: Sequence[Rescaling], product: Callable[[Tensor | None], Tensor], y: Tensor | None
    ) -> Tensor:
        """Outputs `[..., N]`, where `product` gives them of inputs times `[K]`; y: those of inputs as they are."""
        inner = [update for update in updates if update.of_inputs]
        if y is None and [update.shape[0] for update in inner] != [self.out_features]:
            y = product(None)
        for update in inner:
            own = product(update.factors)
            y = own if y is None else torch.where(self._placed(update, own.new_ones(update.shape[0]), 0.0) > 0, own, y)
        assert y is not None
        for update in updates:
            y = y if update.of_inputs else y * self._placed(update, update.factors, 1.0)
        return y

    def _placed(self, update: Update, values: Tensor, elsewhere: float) -> Tensor:
        """A number for each output of the weight, `[N]`, from those of a module's."""
        whole = F.pad(values, (update.first, self.out_features - update.last), value=elsewhere)
        return whole if self.order is None else whole[self.order]

    def _joined(self, updates: Updates) -> tuple[FloatWeight, FloatWeight, Tensor | None]:
        """Products as one. It is kept until an optimizer writes into them."""
        products = [update for update in updates if isinstance(update, Product)]
        sources = tuple(part.storage for update in products for part in update.parts.values())
        versions = tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in sources)
        known = self._known.get(id(updates))
        if known is None or known.versions != versions:
            with torch.no_grad():
                down, up = self._stacked(products)
                normed = any(update.magnitude is not None for update in products)
                norm = self._norm(down, up) if normed else None
                factor = None if norm is None else self._factor(products, norm)
            known = _Joined(FloatWeight(down), FloatWeight(up), norm, factor, sources, versions)
            self._known[id(updates)] = known
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in sources):
            return known.down, known.up, known.factor
        down, up = self._stacked(products)
        return FloatWeight(down), FloatWeight(up), None if known.norm is None else self._factor(products, known.norm)

    def _stacked(self, products: Sequence[Product]) -> tuple[Tensor, Tensor]:
        """down `[ranks, K]` and up `[N, ranks]`, scaled, whose product is the sum of all updates."""
        pairs = [update.matrices() for update in products]
        down = torch.cat([each for each, _ in pairs])
        parts, at, rank = [], 0, 0
        for update, (_, up) in zip(products, pairs):
            beside = len(down) - rank - up.shape[1]
            parts.append(down.new_zeros(update.first - at, len(down)))
            parts.append(F.pad(up * update.scale, (rank, beside)))
            at, rank = update.last, rank + up.shape[1]
        up = torch.cat([*parts, down.new_zeros(self.out_features - at, len(down))])
        return down, up if self.order is None else up[self.order]

    def _norm(self, down: Tensor, up: Tensor) -> Tensor:
        return torch.linalg.vector_norm(self.base.dequantize() + up @ down, dim=1).clamp(min=1e-30)

    def _factor(self, products: Sequence[Product], norm: Tensor) -> Tensor:
        """Factor of each output, `[N]`: 1 where no update has a magnitude."""
        magnitudes, where = [], []
        for update in products:
            if (magnitude := update.magnitude) is not None:
                magnitudes.append(magnitude)
                where.append(torch.arange(update.first, update.last, device=norm.device))
        places = torch.cat(where)
        if self.order is not None:
            places = self.order.argsort()[places]  # of the updates' outputs among the base's
        return torch.ones_like(norm).index_put((places,), torch.cat(magnitudes) / norm[places])

    def merged(self) -> Tensor:
        """The updated weight as one matrix, float32 `[N, K]`; there is one adapter for all rows."""
        (updates,), whole = self.each, self.base.dequantize()
        if rescalings := _rescalings(updates):
            return self._rescaled(rescalings, lambda factors: _times(whole, factors).T, None).T.contiguous()
        down, up, factor = self._joined(updates)
        whole = whole + up.dequantize() @ down.dequantize()
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
        own = {id(part): part.storage.nbytes for updates in self.each for u in updates for part in u.parts.values()}
        return self.base.nbytes + sum(own.values())

    @property
    def device(self) -> torch.device:
        return self.base.device


def _factors(whole: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix `[n, K]` as down `[r, K]` and up `[n, r]`, r the smaller one of n and K."""
    ones = torch.eye(min(whole.shape), dtype=whole.dtype, device=whole.device)
    return (whole, ones) if whole.shape[0] < whole.shape[1] else (ones, whole)


def _rescalings(updates: Updates) -> list[Rescaling]:
    return [update for update in updates if isinstance(update, Rescaling)]


def _times(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else x * factors
