"""A matrix `[N, K]` (outputs, inputs) in one storage: float, or quantized in groups of 32 inputs.

Quantized matrices have one packing for every processor. Sixteen outputs form a block; a block holds, group after group,
the sixteen outputs' numbers and then their scales, so that a product walks through memory once, in order:

    int4   4 x 64 bytes, byte (j, n, b): input 8j + b of output n in the low nibble, input 8j + 4 + b in the high one;
           16 float16 scales, 16 float16 minima                                                              320 bytes
    int8   8 x 64 bytes, byte (j, n, b): input 4j + b of output n, plus 128; 16 float16 scales                544 bytes

(b = 0..3: four inputs of sixteen outputs are what one VNNI instruction multiplies.) The outputs are padded to a
multiple of 16 with zeros inside the packing; the padding is never returned.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.memory import LARGE, zeroed
from lmstate.ops.types.weight import FLOAT_KINDS, Weight

GROUP = 32
"""Inputs that share a scale."""
BLOCK = 16
"""Outputs that are stored together."""
MEASURED = 256
"""Outputs that `quantization_error` looks at."""
_NAMES = {dtype: kind for kind, dtype in FLOAT_KINDS.items()}


class FloatWeight(Weight):
    """A matrix kept as floats: float32, bfloat16 or float16 `[N, K]`, contiguous."""

    def __init__(self, matrix: Tensor) -> None:
        if matrix.dim() != 2 or matrix.dtype not in _NAMES:
            raise ValueError(
                f"a float weight is a matrix of {', '.join(FLOAT_KINDS)}; this is {matrix.dtype} {tuple(matrix.shape)}"
            )
        self.storage = matrix.contiguous()
        self.kind = _NAMES[matrix.dtype]
        self.out_features, self.in_features = matrix.shape

    @property
    def matrix(self) -> Tensor:
        """The matrix itself, `[N, K]`."""
        return self.storage

    def dequantize(self, dtype: torch.dtype = torch.float32, first: int = 0, count: int | None = None) -> Tensor:
        if first == 0 and count is None:  # not cut: backward, a cut is a matrix of zeros and a copy into it
            return self.storage.to(dtype)
        last = self.out_features if count is None else first + count
        return self.storage[first:last].to(dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, self.matrix).float()

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def to(self, device: torch.device | str) -> FloatWeight:
        return FloatWeight(self.matrix.to(device))


class _GroupedWeight(Weight):
    """Packed blocks of the two quantized kinds, and the views into them."""

    QUANTS: ClassVar[int]
    """Bytes of the numbers of one group of one block."""
    activations: int
    PARAMETERS: ClassVar[int]
    """Float16 numbers per output and group: a scale, and a minimum where there is one."""

    def __init__(self, packed: Tensor, out_features: int, in_features: int, activations: int = 16) -> None:
        if activations not in (8, 16):
            raise ValueError(f"activations of {activations} bits were asked for; there are 8 and 16")
        width = self.QUANTS + BLOCK * 2 * self.PARAMETERS
        want = (-(-out_features // BLOCK), in_features // GROUP, width)
        if in_features % GROUP or packed.dtype != torch.uint8 or tuple(packed.shape) != want:
            raise ValueError(
                f"{self.kind} packing of a [{out_features}, {in_features}] matrix is uint8 {list(want)}; "
                f"this is {packed.dtype} {list(packed.shape)}; pack it again"
            )
        self.storage = packed.contiguous()
        self.out_features, self.in_features, self.activations = out_features, in_features, activations

    def with_activations(self, bits: int) -> Weight:
        return self if bits == self.activations else type(self)(self.storage, *self.shape, bits)

    def to(self, device: torch.device | str) -> Weight:
        return type(self)(self.storage.to(device), *self.shape, self.activations)

    @property
    def _parameters(self) -> Tensor:
        """float16 `[blocks, groups, PARAMETERS, 16]`, a view of the storage."""
        return self.storage[:, :, self.QUANTS :].view(torch.float16).unflatten(2, (self.PARAMETERS, BLOCK))

    @abstractmethod
    def _numbers(self, quants: Tensor) -> Tensor:
        """uint8 `[..., groups, j, 4]` of one output -> its numbers, float32 `[..., groups, 32]`."""

    @property
    def _quants(self) -> Tensor:
        """uint8 `[blocks, groups, j, 16, 4]`, a view of the storage."""
        return self.storage[:, :, : self.QUANTS].unflatten(2, (-1, BLOCK, 4))

    def rows(self, ids: Tensor) -> Tensor:
        library = dispatch.native(self.storage, ids)
        if library is not None:
            return library.dense.rows(self, ids)
        block, output = ids // BLOCK, ids % BLOCK
        numbers = self._numbers(self._quants[block, :, :, output])  # [..., groups, 32]
        parameters = self._parameters[block, :, :, output].float()  # [..., groups, PARAMETERS]
        numbers *= parameters[..., :1]
        if self.PARAMETERS == 2:
            numbers += parameters[..., 1:]
        return numbers.flatten(-2)

    def dequantize(self, dtype: torch.dtype = torch.float32, first: int = 0, count: int | None = None) -> Tensor:
        last = self.out_features if count is None else min(first + count, self.out_features)
        library = dispatch.native(self.storage)
        if library is not None and dtype in (torch.float32, torch.bfloat16):
            panel = torch.empty(last - first, self.in_features, dtype=dtype)
            library.dense.dequantize(self, first, panel)
            return panel
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        numbers = self._numbers(self._quants[blocks].permute(0, 3, 1, 2, 4))  # [blocks, 16, groups, 32]
        parameters = self._parameters[blocks].permute(0, 3, 1, 2).float()  # [blocks, 16, groups, PARAMETERS]
        numbers = numbers * parameters[..., :1]
        if self.PARAMETERS == 2:
            numbers += parameters[..., 1:]
        return numbers.flatten(2).flatten(0, 1)[first % BLOCK :][: last - first].to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"packed": self.storage}

    def in_large_pages(self) -> Weight:
        if not LARGE or self.device.type != "cpu":
            return self
        memory = zeroed(self.nbytes).view(self.storage.shape)
        return type(self)(memory.copy_(self.storage), *self.shape, self.activations)


class Int4Weight(_GroupedWeight):
    """w = scale * q + minimum, q in 0..15, a scale and a minimum (float16) for each group of 32 inputs."""

    kind = "int4"
    QUANTS = 256
    PARAMETERS = 2

    @classmethod
    def pack(cls, q: Tensor, scale: Tensor, minimum: Tensor) -> Int4Weight:
        """q: uint8 `[N, K]` of 0..15; scale, minimum: `[N, K / 32]`, rounded to float16."""
        _check_pack(q, torch.uint8, scale, minimum)
        n, k = q.shape
        q, scale, minimum = _pad(q), _pad(scale), _pad(minimum)
        low, high = q.view(-1, BLOCK, k // GROUP, 4, 2, 4).unbind(4)  # [blocks, 16, groups, j, b]
        quants = (low | (high << 4)).permute(0, 2, 3, 1, 4).flatten(2)  # [blocks, groups, 256]
        return cls(torch.cat([quants, _halves(scale), _halves(minimum)], dim=2), n, k)

    def _numbers(self, quants: Tensor) -> Tensor:
        return torch.stack([quants & 15, quants >> 4], dim=-2).flatten(-3).float()


class Int8Weight(_GroupedWeight):
    """w = scale * q, q in -128..127, a scale (float16) for each group of 32 inputs."""

    kind = "int8"
    QUANTS = 512
    PARAMETERS = 1

    @classmethod
    def pack(cls, q: Tensor, scale: Tensor) -> Int8Weight:
        """q: int8 `[N, K]`; scale: `[N, K / 32]`, rounded to float16."""
        _check_pack(q, torch.int8, scale)
        n, k = q.shape
        q, scale = _pad(q.view(torch.uint8) ^ 128), _pad(scale)
        quants = q.view(-1, BLOCK, k // GROUP, 8, 4).permute(0, 2, 3, 1, 4).flatten(2)  # [blocks, groups, 512]
        return cls(torch.cat([quants, _halves(scale)], dim=2), n, k)

    def _numbers(self, quants: Tensor) -> Tensor:
        return quants.flatten(-2).float() - 128


def weight_from_tensors(kind: str, shape: tuple[int, int], tensors: dict[str, Tensor]) -> Weight:
    """Rebuild a weight from what `tensors()` gave. ValueError if they do not fit `kind` and `shape`."""
    if kind in FLOAT_KINDS:
        matrix = tensors["matrix"]
        if matrix.shape != tuple(shape) or matrix.dtype != FLOAT_KINDS[kind]:
            raise ValueError(
                f"a {kind} weight of shape {tuple(shape)} was asked for, but the stored tensor is "
                f"{matrix.dtype} {tuple(matrix.shape)}; pack it again"
            )
        return FloatWeight(matrix)
    if kind == "int4":
        return Int4Weight(tensors["packed"], *shape)
    if kind == "int8":
        return Int8Weight(tensors["packed"], *shape)
    raise ValueError(f"no weight kind is called {kind!r}; there are {', '.join(FLOAT_KINDS)}, int8 and int4")


def quantize(matrix: Tensor, kind: str) -> Weight:
    """Store a float matrix `[N, K]` as `kind`: "float32", "bfloat16", "float16", "int8" or "int4".

    int4 spans each group's smallest to largest number in 16 levels, int8 its largest magnitude in 127. A matrix whose K
    is not a multiple of 32 has no whole groups and is kept as bfloat16 instead.
    """
    if kind in FLOAT_KINDS:
        return FloatWeight(matrix.to(FLOAT_KINDS[kind]))
    if kind not in ("int4", "int8"):
        raise ValueError(f"no weight kind is called {kind!r}; there are {', '.join(FLOAT_KINDS)}, int8 and int4")
    if matrix.dim() != 2:
        raise ValueError(f"a weight is a matrix [N, K]; this tensor is {list(matrix.shape)}")
    if matrix.shape[1] % GROUP:
        return FloatWeight(matrix.to(torch.bfloat16))
    q, scale, minimum = rounded(matrix, kind)
    return Int8Weight.pack(q, scale) if minimum is None else Int4Weight.pack(q, scale, minimum)


def rounded(matrix: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """The integers `[N, K]` that `quantize` stores a float matrix in, and the scales and minima `[N, K / 32]`.

    int8 without minima, or uint8 of 0..15 with them; the latter two are float32 numbers that float16 has.
    """
    n, k = matrix.shape
    groups = matrix.float().view(n, k // GROUP, GROUP)
    # Scales are rounded to float16 before the numbers are chosen, so that the rounding costs no accuracy.
    if kind == "int8":
        scale = _half(groups.abs().amax(-1) / 127)
        q8 = (groups / _divisor(scale)).round_().clamp_(-127, 127).to(torch.int8)
        return q8.flatten(1), scale, None
    minimum = _half(groups.amin(-1))
    scale = _half((groups.amax(-1) - minimum).clamp_(min=0) / 15)
    q4 = ((groups - minimum[..., None]) / _divisor(scale)).round_().clamp_(0, 15).to(torch.uint8)
    return q4.flatten(1), scale, minimum


def quantization_error(matrix: Tensor, kind: str) -> float:
    """The loss of `quantize` on a float matrix `[N, K]`: each input's root mean square error over that of its numbers.

    The mean over the inputs, each counting alike, because those with small weights tend to have large activations: a
    column of outliers, which spreads the levels of its whole group, costs its neighbors and not itself. 0 where nothing
    is rounded to integers. Measured on at most `MEASURED` outputs, evenly spread.
    """
    if not matrix.numel() or matrix.shape[1] % GROUP or kind in FLOAT_KINDS:
        return 0.0
    sample = matrix[:: -(-len(matrix) // MEASURED)].float()
    lost = quantize(sample, kind).dequantize().sub_(sample).square_().sum(0)
    return float((lost / sample.square().sum(0).clamp_(min=torch.finfo(torch.float32).tiny)).mean().sqrt())


def _half(x: Tensor) -> Tensor:
    return x.half().float()


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)[..., None]


def _pad(x: Tensor) -> Tensor:
    """Zero rows up to a multiple of 16."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % BLOCK)).contiguous()


def _halves(parameter: Tensor) -> Tensor:
    """`[padded N, groups]` -> the bytes of its float16 numbers, uint8 `[blocks, groups, 32]`."""
    blocks = parameter.half().view(-1, BLOCK, parameter.shape[1]).transpose(1, 2)
    return blocks.contiguous().view(torch.uint8)


def _check_pack(q: Tensor, dtype: torch.dtype, *parameters: Tensor) -> None:
    if q.dim() != 2 or q.dtype != dtype or q.shape[1] % GROUP:
        raise ValueError(
            f"numbers to pack are {dtype} [N, K] with K a multiple of {GROUP}; these are {q.dtype} {list(q.shape)}"
        )
    want = (q.shape[0], q.shape[1] // GROUP)
    for parameter in parameters:
        if tuple(parameter.shape) != want:
            raise ValueError(
                f"scales and minima of a {list(q.shape)} matrix are {list(want)}; this is {list(parameter.shape)}"
            )
