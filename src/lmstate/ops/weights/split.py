"""A matrix of which each of several ranks holds a part.

`SplitWeight`: each rank multiplies whole inputs with its own outputs, and then gets those of the others. So a number is
the sum of the same products in the same order as where one process holds the whole matrix. `SummedWeight`: each rank
multiplies its own inputs, and the products are added (Megatron-LM, 1909.08053). That exchanges less and sums in another
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from lmstate.errors import UnsupportedError
from lmstate.ops.types.params import Norm, Residual
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.grouped import BLOCK, GROUP, FloatWeight, Int4Weight, Int8Weight


class Gathering(Protocol):
    """A group of ranks."""

    @property
    def rank(self) -> int: ...

    def gather(self, own: Tensor, widths: Sequence[int], dim: int = -1) -> Tensor:
        """Tensors of all ranks, `widths[rank]` wide in one dimension, joined there in the order of the ranks."""
        ...

    def sum(self, own: Tensor) -> Tensor:
        """Tensors of all ranks, of one shape, added in the order of the ranks."""
        ...


class PartWeight(Weight):
    """`own`: the part of this rank.

    Native bodies do not take such a weight: its `storage` is on the meta device.
    """

    def __init__(self, own: Weight, group: Gathering, out_features: int, in_features: int) -> None:
        self.own, self.group = own, group
        self.kind, self.activations = own.kind, own.activations
        self.storage = torch.empty(0, device="meta")
        self.out_features, self.in_features = out_features, in_features

    def rows(self, ids: Tensor) -> Tensor:
        raise UnsupportedError("a matrix whose products are added over several processes cannot look up rows")

    def dequantize(self, dtype: torch.dtype = torch.float32, first: int = 0, count: int | None = None) -> Tensor:
        raise UnsupportedError("a matrix over several processes is multiplied, and never expanded")

    def tensors(self) -> dict[str, Tensor]:
        return self.own.tensors()

    def to(self, device: torch.device | str) -> Weight:
        raise UnsupportedError("a matrix over several processes stays where it is")

    @property
    def nbytes(self) -> int:
        return self.own.nbytes

    @property
    def device(self) -> torch.device:
        return self.own.device


class SummedWeight(PartWeight):
    """`own`: the inputs of this rank, with all outputs; `inputs[rank]`: the number of each rank's."""

    def __init__(self, own: Weight, group: Gathering, inputs: Sequence[int]) -> None:
        super().__init__(own, group, own.out_features, sum(inputs))

    def product(self, linear: Callable[..., Tensor], x: Tensor, bias: Tensor | None, gate: str | None) -> Tensor:
        """float32 `[..., N]`, as `ops.linear` gives it; `linear` multiplies with `own`."""
        y = self.group.sum(linear(x, self.own, gate=gate))
        return y if bias is None else y + bias


class SplitWeight(PartWeight):
    """`own`: the outputs of this rank; `outputs[rank]`: the number of each rank's. With `inputs`, each rank holds
    `inputs[rank]` inputs of a product, which are gathered first.
    """

    def __init__(
        self, own: Weight, group: Gathering, outputs: Sequence[int], inputs: Sequence[int] | None = None
    ) -> None:
        super().__init__(own, group, sum(outputs), own.in_features)
        self.outputs, self.inputs = tuple(outputs), None if inputs is None else tuple(inputs)
        self._bounds = [0, *accumulate(self.outputs)]
        self.first, self.last = self._bounds[group.rank], self._bounds[group.rank + 1]

    def product(
        self,
        linear: Callable[..., Tensor],
        enter: Callable[[Tensor, Norm | None, str | None], Tensor],
        x: Tensor,
        bias: Tensor | None,
        norm: Norm | None,
        gate: str | None,
        residual: Residual | None,
    ) -> Tensor:
        """float32 `[..., N]`, as `ops.linear` gives it; `linear` multiplies with `own`, `enter` applies norm and gate.

        A residual has no norm: one comes after all outputs.
        """
        if self.inputs is not None:
            if gate is not None:
                x, gate = enter(x, None, gate), None
            x = self.group.gather(x, self.inputs)
        bias = None if bias is None else bias[self.first : self.last]
        if residual is not None:
            assert residual.norm is None, "a norm reads all outputs"
            residual = residual._replace(stream=residual.stream[..., self.first : self.last].contiguous())
        y = linear(x, self.own, bias, norm=norm, gate=gate, residual=residual)
        return self.group.gather(y, self.outputs)

    def rows(self, ids: Tensor) -> Tensor:
        own = (ids >= self.first) & (ids < self.last)
        found = self.own.rows(torch.where(own, ids - self.first, 0))
        each = self.group.gather(found[..., None, :], [1] * len(self.outputs), dim=-2)  # [..., ranks, K]
        rank = torch.bucketize(ids.contiguous(), torch.tensor(self._bounds[1:]), right=True)
        return each.gather(-2, rank[..., None, None].expand(*rank.shape, 1, each.shape[-1])).squeeze(-2)


def selected(weight: Weight, outputs: Tensor) -> Weight:
    """The matrix with these of its outputs, int64 `[n]`, in their order; the same numbers in the same storage."""
    if isinstance(weight, FloatWeight):
        return FloatWeight(weight.matrix[outputs])
    if isinstance(weight, Int4Weight | Int8Weight):
        parts = [
            _packed(part.unflatten(2, (-1, BLOCK, each)), outputs)
            for part, each in (
                (weight.storage[:, :, : weight.QUANTS], 4),
                (weight.storage[:, :, weight.QUANTS :], 2),
            )
        ]
        return type(weight)(torch.cat(parts, dim=2), len(outputs), weight.in_features, weight.activations)
    raise UnsupportedError(f"the outputs of a {weight.kind} matrix cannot be parted")


def selected_inputs(weight: Weight, first: int, count: int) -> Weight:
    """The matrix with `count` of its inputs; of a quantized one in whole groups of 32."""
    if isinstance(weight, FloatWeight):
        return FloatWeight(weight.matrix[:, first : first + count])
    if isinstance(weight, Int4Weight | Int8Weight):
        assert first % GROUP == count % GROUP == 0, "a scale is of a whole group"
        packed = weight.storage[:, first // GROUP : (first + count) // GROUP]
        return type(weight)(packed, weight.out_features, count, weight.activations)
    raise UnsupportedError(f"the inputs of a {weight.kind} matrix cannot be parted")


def _packed(stored: Tensor, outputs: Tensor) -> Tensor:
    """Of uint8 `[blocks, groups, j, 16, bytes]` the given outputs in blocks of their own, `[blocks, groups, ..]`."""
    found = stored[outputs // BLOCK, :, :, outputs % BLOCK]  # [n, groups, j, bytes]
    found = torch.nn.functional.pad(found, (0, 0) * 3 + (0, -len(outputs) % BLOCK))
    return found.unflatten(0, (-1, BLOCK)).permute(0, 2, 3, 1, 4).flatten(2)
