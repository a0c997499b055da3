"""The block formats of ggml: how a row of a tensor is stored, and what it means.

Rows are cut into blocks of `numbers` values in `nbytes` bytes. Formats whose blocks are whole groups of 32 small
integers are taken apart exactly (`GroupedQuant`); the others are dequantized, which is also the meaning that every
format has in https://github.com/ggml-org/ggml (ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate.checkpoints.huggingface import mxfp4
from lmstate.checkpoints.source import GROUP, GroupedQuant, floats


@dataclass(frozen=True)
class BlockFormat:
    type_id: int  # ggml's number for it
    numbers: int  # values in a block
    nbytes: int  # bytes in a block
    kind: str  # the storage of lmstate that comes closest
    groups: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]] | None = None
    # groups(blocks uint8 [B, nbytes]) -> q [B, numbers], scale float32 [B, numbers/32], minimum or None

    @property
    def converted(self) -> bool:
        """Whether its numbers are dequantized, and rounded again to the storage that comes closest."""
        return self.dtype is None and self.groups is None

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype, for formats that are plain numbers."""
        return {0: torch.float32, 1: torch.float16, 26: torch.int32, 27: torch.int64, 30: torch.bfloat16}.get(
            self.type_id
        )


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, as float32 [B, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n]: all low halves, then all high halves."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[B, 4] bytes -> [B, 32]: bit i of the little-endian 32-bit word, as 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed.unsqueeze(-1) >> shifts) & 1) << 4).reshape(len(packed), GROUP)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, scale * -8


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return q.to(torch.int8) - 16, _half(blocks, 0), None


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit scales and minima, 8 of each, of a K-quant super-block: [B, 12] -> two uint8 [B, 8].

    Bytes 0-3 and 4-7 hold the first four scales and minima in their low 6 bits. Bytes 8-11 hold the low 4 bits of the
    last four (scale low, minimum high). The upper 2 bits of these are the top bits of bytes 0-3 and 4-7.
    """
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], dim=1)
    return scales, minima


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    scales, minima = _k_scales(blocks[:, 4:16])
    # 128 bytes are four runs of 32: the low halves are one group of 32 values, the high halves the next.
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return q, _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return mxfp4.whole_numbers(_nibbles(blocks[:, 1:])), mxfp4.scale(blocks[:, :1]), None


def _bits(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Q1_0: a sign each."""
    shifts = torch.arange(8, dtype=torch.uint8)
    q = ((blocks[:, 2:].unsqueeze(-1) >> shifts) & 1).flatten(1)
    scale = _half(blocks, 0)
    return q, _each_group(scale * 2, q), _each_group(-scale, q)


def _tq2_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ternary, four in a byte: the bytes' lowest two bits are the first 32 numbers of 128, and so on."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    q = ((blocks[:, :64].view(-1, 2, 1, 32) >> shifts) & 3).flatten(1)
    return q, _each_group(_half(blocks, 64), q), _each_group(-_half(blocks, 64), q)


def _tq1_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ternary, five in a byte as digits of a fraction: 32 bytes, 16 bytes, and 4 bytes with four digits each."""
    parts = []
    for begin, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = torch.tensor([3**digit for digit in range(digits)], dtype=torch.int32).view(1, digits, 1)
        shifted = (blocks[:, begin:end].to(torch.int32).unsqueeze(1) * powers) & 255
        parts.append(((shifted * 3) >> 8).to(torch.uint8).flatten(1))
    q = torch.cat(parts, dim=1)
    return q, _each_group(_half(blocks, 52), q), _each_group(-_half(blocks, 52), q)


def _each_group(value: Tensor, q: Tensor) -> Tensor:
    """A number of a block, float32 [B, 1], for each of its groups."""
    return value.repeat(1, q.shape[1] // GROUP)


FORMATS = {
    "F32": BlockFormat(0, 1, 4, "float32"),
    "F16": BlockFormat(1, 1, 2, "float16"),
    "BF16": BlockFormat(30, 1, 2, "bfloat16"),
    "I32": BlockFormat(26, 1, 4, "float32"),  # tables of numbers of experts
    "I64": BlockFormat(27, 1, 8, "float32"),  # ids of tokens
    "Q4_0": BlockFormat(2, 32, 18, "int4", _q4_0),
    "Q4_1": BlockFormat(3, 32, 20, "int4", _q4_1),
    "Q5_0": BlockFormat(6, 32, 22, "int8", _q5_0),
    "Q5_1": BlockFormat(7, 32, 24, "int8"),
    "Q8_0": BlockFormat(8, 32, 34, "int8", _q8_0),
    "Q2_K": BlockFormat(10, 256, 84, "int8"),
    "Q3_K": BlockFormat(11, 256, 110, "int8"),
    "Q4_K": BlockFormat(12, 256, 144, "int4", _q4_k),
    "Q5_K": BlockFormat(13, 256, 176, "int8"),
    "Q6_K": BlockFormat(14, 256, 210, "int8"),
    "IQ4_NL": BlockFormat(20, 32, 18, "int8"),
    "IQ4_XS": BlockFormat(23, 256, 136, "int8"),
    "IQ1_S": BlockFormat(19, 256, 50, "int8"),
    "IQ1_M": BlockFormat(29, 256, 56, "int8"),
    "IQ2_XXS": BlockFormat(16, 256, 66, "int8"),
    "IQ2_XS": BlockFormat(17, 256, 74, "int8"),
    "IQ2_S": BlockFormat(22, 256, 82, "int8"),
    "IQ3_XXS": BlockFormat(18, 256, 98, "int8"),
    "IQ3_S": BlockFormat(21, 256, 110, "int8"),
    "Q1_0": BlockFormat(41, 128, 18, "int4", _bits),
    "TQ1_0": BlockFormat(34, 256, 54, "int4", _tq1_0),
    "TQ2_0": BlockFormat(35, 256, 66, "int4", _tq2_0),
    "NVFP4": BlockFormat(40, 64, 36, "int8"),
    "MXFP4": BlockFormat(39, 32, 17, "int8", _mxfp4),
}


@dataclass(frozen=True, eq=False)
class PackedRows:
    """A `RowTable` of quantized rows. `raw`: uint8 `[N, bytes of a row]`, in the mapped file."""

    raw: Tensor
    format: str
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.raw), self.columns)

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, rows: Tensor) -> Tensor:
        return floats(take_apart(self.raw[rows], self.format, self.columns))


def take_apart(raw: Tensor, format_: str, columns: int) -> GroupedQuant | Tensor:
    """The rows in `raw` (uint8, any shape) as groups where the format allows it exactly, else float32 [N, columns]."""
    form = FORMATS[format_]
    if form.groups is None:
        return dequantize(raw, format_).view(-1, columns)
    q, scale, minimum = form.groups(raw.reshape(-1, form.nbytes))
    shape = (-1, columns // GROUP)
    return GroupedQuant(q.view(-1, columns), scale.view(shape), None if minimum is None else minimum.view(shape))


def dequantize(raw: Tensor, format_: str) -> Tensor:
    """All numbers of blocks of a quantized format, float32 [numbers]."""
    import gguf
    import numpy

    form = FORMATS[format_]
    with numpy.errstate(all="ignore"):  # a hostile scale may overflow; the caller looks at the result
        values = gguf.quants.dequantize(raw.reshape(-1, form.nbytes).numpy(), gguf.GGMLQuantizationType(form.type_id))
    return torch.from_numpy(values).view(-1)
