"""bfloat16 matrices in 12 bits a number, without losing any: decoding costs what it reads, and this is a quarter less.

The upper byte of a weight, its sign and most of its exponent, takes few values: the weights of a layer are within some
powers of two. Fifteen of them, and 0, are a table that four bits point into; the lower byte is stored as it is. The few
other weights, one in some thousands, follow with their places. (DFloat11, 2504.11651, saves a little more by a code of
variable length, which would take a processor longer than its memory.)

    spans   four outputs by 64 inputs each: twice 2 x 32 bytes of codes, byte i with that of place i in the low nibble
            and that of place i + 32 in the high one, and then 2 x 64 lower bytes                           384 bytes
    table   16 upper bytes, the first of them 0
    first   int32 `[N + 1]`: where each output's rare numbers begin
    rare    int32 output, int32 column, float32 value; in the order of outputs

Input i of a span has the place that `_places` says: so native bodies need no permutation. The outputs are padded to a
multiple of four.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.memory import zeroed
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.grouped import FloatWeight

SPAN = 64
BESIDE = 4
SPAN_BYTES = BESIDE * SPAN * 3 // 2
TABLE = 16
RARE_BYTES = 12
MOST_RARE = 1 / 64
"""The part of a matrix that may be rare numbers; more would cost what is saved."""


class Bfloat12Weight(Weight):
    """A matrix of bfloat16 numbers `[N, K]` in 12 bits each, exactly. K is a multiple of 64."""

    kind = "bfloat16 in 12 bits"

    def __init__(self, packed: Tensor, out_features: int, in_features: int) -> None:
        """ValueError if `packed`, uint8 of one axis, is not of this shape."""
        self.storage = packed.contiguous()
        self.out_features, self.in_features = out_features, in_features
        spans, least = _sizes(out_features, in_features)
        rare = (packed.numel() - least) // RARE_BYTES
        if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() != least + max(rare, 0) * RARE_BYTES:
            raise ValueError(
                f"a [{out_features}, {in_features}] matrix in 12 bits is uint8 [{least}] and {RARE_BYTES} for each "
                f"rare number; this is {packed.dtype} {list(packed.shape)}"
            )
        self._spans = self.storage[:spans].view(-1, in_features // SPAN, SPAN_BYTES)
        self._table = self.storage[spans : spans + TABLE]
        self._first = self.storage[spans + TABLE : least].view(torch.int32)
        self._rare = self.storage[least:].view(torch.int32).view(rare, RARE_BYTES // 4)
        counts, columns = self._first.diff(), self._rare[:, 1]
        ends = int(self._first[0]), int(self._first[-1])
        whole = ends == (0, rare) and not bool((counts < 0).any())
        if (
            not whole
            or not torch.equal(self._rare[:, 0].long(), self._outputs())
            or not bool(((columns >= 0) & (columns < in_features)).all())
        ):
            raise ValueError(f"the rare numbers of a [{out_features}, {in_features}] matrix in 12 bits are damaged")

    def dequantize(self, dtype: torch.dtype = torch.float32, first: int = 0, count: int | None = None) -> Tensor:
        last = self.out_features if count is None else min(first + count, self.out_features)
        library = dispatch.native(self.storage)
        if library is not None and dtype in (torch.float32, torch.bfloat16):
            panel = torch.empty(last - first, self.in_features, dtype=dtype)
            library.dense.dequantize(self, first, panel)
            return panel
        pairs = self._spans.unflatten(-1, (BESIDE // 2, -1)).split([SPAN, 2 * SPAN], dim=-1)
        code, low = (part.unflatten(-1, (2, -1)).flatten(2, 3) for part in pairs)  # [blocks, spans, 4, 32 or 64]
        high = self._table[torch.cat([code & 15, code >> 4], dim=-1).int()]
        numbers = torch.stack([low, high], dim=-1)[..., _places(), :].view(torch.bfloat16)[..., 0]
        matrix = numbers.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features].to(dtype)
        matrix[self._outputs(), self._rare[:, 1].long()] = self._rare[:, 2].view(torch.float32).to(dtype)
        return matrix[first:last]

    def _outputs(self) -> Tensor:
        """int64: of which output each rare number is."""
        return torch.repeat_interleave(torch.arange(self.out_features), self._first.diff())

    def rows(self, ids: Tensor) -> Tensor:
        library = dispatch.native(self.storage, ids)
        return library.dense.rows(self, ids) if library is not None else self.dequantize()[ids]

    def tensors(self) -> dict[str, Tensor]:
        """Packed tensor; no file has this kind, since packing takes no longer than reading."""
        return {"packed": self.storage}

    def to(self, device: torch.device | str) -> Weight:
        return self if torch.device(device).type == "cpu" else self.plain().to(device)

    def plain(self) -> FloatWeight:
        """Unpacked matrix."""
        return FloatWeight(self.dequantize(torch.bfloat16))


def to_bfloat12(weight: Weight) -> Weight:
    """Pack a weight losslessly: a bfloat16 matrix on the processor in 12 bits, where a native body reads them.

    Anything else comes back as it is: K that is not a multiple of 64, or a matrix with many numbers of rare magnitude.
    """
    table = common_bytes(weight)
    return weight if table is None else packed(weight, table)


def common_bytes(weight: Weight) -> Tensor | None:
    """The 15 most common upper bytes of a bfloat16 matrix beside 0, uint8; None where it is not to be packed."""
    library = dispatch.native(weight.storage)
    n, k = weight.shape
    if library is None or weight.kind != "bfloat16" or k % SPAN or not n * k:
        return None
    seen = library.dense.high_bytes(weight.storage)
    total, seen[0] = n * k - int(seen[0]), 0  # 0 is always in the table, and numbers below 2**-126 with it
    often = seen.topk(TABLE - 1)
    return None if total - int(often.values.sum()) > MOST_RARE * n * k else often.indices.to(torch.uint8)


def packed(weight: Weight, table: Tensor) -> Weight:
    """A bfloat16 matrix in 12 bits with a table of common bytes: its own, or those of a matrix that it is a part of.

    The table decides which numbers are rare, and so in which order a product is summed.
    """
    library = dispatch.native(weight.storage)
    assert library is not None, "only native bodies read it"
    n, k = weight.shape
    seen = library.dense.high_bytes(weight.storage)
    rare = n * k - sum(int(seen[byte]) for byte in {0, *table.tolist()})
    spans, least = _sizes(n, k)
    memory = zeroed(least + rare * RARE_BYTES)
    memory[spans + 1 : spans + TABLE] = table
    library.dense.to_bfloat12(weight.storage, memory)
    return Bfloat12Weight(memory, n, k)


def _sizes(n: int, k: int) -> tuple[int, int]:
    """Bytes of all spans, and of everything but the rare numbers."""
    spans = -(-n // BESIDE) * (k // SPAN) * SPAN_BYTES
    return spans, spans + TABLE + 4 * (n + 1)


def _places() -> Tensor:
    """Offsets of a span's inputs in it, int64 `[64]`."""
    i = torch.arange(SPAN)
    return 16 * (i // 4 % 4) + 8 * (i // 32) + 2 * (i % 4) + i // 16 % 2
