"""Attention over keys and values of 8, 4, 3 and 2 bits, in blocks of slabs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.attention.attend import attend_reference
from lmstate.ops.attention.attend_quantized import attend_quantized
from lmstate.ops.cuda import attention
from lmstate.ops.types import kv_format
from lmstate.ops.types.params import AttentionParams, CausalMask, QuantizedKV
from lmstate.ops.types.slabs import BufferShape
from tests.interpreted.test_kernels import CLOSE, slab_tables

HEADS, DIM = 3, 32


def stored(lengths: list[int]) -> QuantizedKV:
    shapes = [BufferShape((HEADS,), DIM, torch.int8), BufferShape((HEADS,), 1, torch.float16)] * 2
    k, k_scale, v, v_scale = slab_tables(lengths, shapes)
    return QuantizedKV(8, k, v, k_scale, v_scale)


def fed(kv: QuantizedKV, k: Tensor, v: Tensor, cuts: list[list[int]]) -> None:
    """Store `k` and `v` `[R, S, K, D]` in steps of `cuts[i][r]` tokens of row r."""
    starts = torch.zeros(len(k), dtype=torch.int64)
    params = AttentionParams(1.0)
    for counts in cuts:
        width = max(counts)
        new = tuple(torch.full((len(k), width, HEADS, DIM), torch.nan) for _ in range(2))
        for row, count in enumerate(counts):
            for into, whole in zip(new, (k, v)):
                into[row, :count] = whole[row, int(starts[row]) : int(starts[row]) + count]
        q = torch.zeros(len(k), width, HEADS, DIM)
        attention.attend_codes(
            q, (new[0], new[1]), kv, starts, torch.tensor(counts), params, CausalMask(), torch.float32
        )
        starts = starts + torch.tensor(counts)


def floats(codes: Tensor, scales: Tensor) -> Tensor:
    return kv_format.hadamard(kv_format.decode(codes, scales, 8))


def test_transforms_and_codes_are_those_of_the_format() -> None:
    x = torch.randn(2, 5, HEADS, DIM)
    torch.testing.assert_close(attention.hadamard(x), kv_format.hadamard(x), rtol=1e-5, atol=1e-6)
    kv = stored([70, 9])
    k, v = torch.randn(2, 70, HEADS, DIM), torch.randn(2, 70, HEADS, DIM)
    k[0, 66] = 0
    fed(kv, k, v, [[62, 9], [8, 0]])
    for own, scales, given in ((kv.k, kv.k_scale, k), (kv.v, kv.v_scale, v)):
        codes, spread = own.dense(), scales.dense()  # type: ignore[union-attr]
        for row, length in enumerate((70, 9)):
            expected, scale = kv_format.encode(kv_format.hadamard(given[row, :length]).transpose(0, 1), 8, 512)
            torch.testing.assert_close(spread[row, :, :length], scale, rtol=1e-3, atol=0)
            nothing = scale == 0
            apart = (codes[row, :, :length].int() - expected.int()).abs().masked_fill(nothing, 0)
            assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [CausalMask(), CausalMask(window=70)])
def test_attention_reads_what_codes_stand_for(dtype: torch.dtype, mask: CausalMask) -> None:
    lengths = [600, 130]
    kv, params = stored(lengths), AttentionParams(DIM**-0.5, sinks=torch.randn(2 * HEADS))
    k, v = torch.randn(2, 600, HEADS, DIM), torch.randn(2, 600, HEADS, DIM)
    for codes, scales, floats_of in ((kv.k, kv.k_scale, k), (kv.v, kv.v_scale, v)):
        for table, new in zip((codes, scales), kv_format.encode(kv_format.hadamard(floats_of), 8, 512)):
            table.write(new, torch.zeros(2, dtype=torch.int64), torch.tensor(lengths))  # type: ignore[union-attr]
    q, counts = torch.randn(2, 4, 2 * HEADS, DIM), torch.tensor([4, 1])
    starts = torch.tensor(lengths) - counts
    y = attention.attend_codes(q, None, kv, starts, counts, params, mask, dtype)
    for row in range(2):
        one = slice(row, row + 1)
        held = [floats(a.dense()[one, :, : lengths[row]], b.dense()[one, :, : lengths[row]])
                for a, b in ((kv.k, kv.k_scale), (kv.v, kv.v_scale))]  # type: ignore[union-attr] # fmt: skip
        expected = attend_reference(q[one], *held, starts[one], counts[one], params, mask)
        torch.testing.assert_close(y[one], expected, rtol=0, atol=max(CLOSE[dtype], 1e-5))
    assert not y[1, 1:].any()


def test_codes_and_attention_have_the_same_bits_for_any_cut_and_neighbor() -> None:
    k, v, q = torch.randn(1, 90, HEADS, DIM), torch.randn(1, 90, HEADS, DIM), torch.randn(1, 90, HEADS, DIM)
    params, mask, found = AttentionParams(0.2), CausalMask(), []
    for cuts in ([[90]], [[1], [62], [20], [7]]):
        kv = stored([90])
        fed(kv, k, v, cuts)
        found.append([x.dense()[:, :, :90] for x in kv.tensors])  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(*found))
    whole = attention.attend_codes(q, None, kv, torch.tensor([0]), torch.tensor([90]), params, mask, torch.bfloat16)
    one = attention.attend_codes(
        q[:, 77:78], None, kv, torch.tensor([77]), torch.tensor([1]), params, mask, torch.bfloat16
    )
    assert torch.equal(one, whole[:, 77:78])


WIDE = 64
"""Numbers of a key whose block has two of its scales and middles in each slot."""


def few_bits(bits: int, lengths: list[int], dtype: torch.dtype) -> tuple[QuantizedKV, QuantizedKV]:
    """Room for so many positions of a head in 4, 3 or 2 bits: blocks of slabs, and rings for the reference."""
    line, places = WIDE * bits // 8, -(-max(lengths) // kv_format.BLOCK) * kv_format.BLOCK
    widths = [(line, torch.uint8), (kv_format.block_scales(WIDE), torch.float16)]
    widths += [(line, torch.uint8), (1, torch.float16)]
    k, k_scale, v, v_scale = slab_tables(lengths, [BufferShape((1,), width, kind) for width, kind in widths])
    (tail,) = slab_tables(lengths, [BufferShape((1,), WIDE, dtype)])
    rings = [torch.zeros(len(lengths), 1, places, width, dtype=kind) for width, kind in [*widths, (WIDE, dtype)]]
    return QuantizedKV(bits, k, v, k_scale, v_scale, tail), QuantizedKV(bits, *(rings[i] for i in (0, 2, 1, 3, 4)))


@pytest.mark.parametrize(
    ("bits", "dtype", "mask"),
    [
        (4, torch.float32, CausalMask()),
        (4, torch.bfloat16, CausalMask(window=65)),
        (3, torch.float32, CausalMask(window=65)),
        (3, torch.bfloat16, CausalMask()),
        (2, torch.bfloat16, CausalMask()),
        (2, torch.float32, CausalMask(window=65)),
    ],
)
def test_keys_in_codes_of_their_blocks(bits: int, dtype: torch.dtype, mask: CausalMask) -> None:
    """Ragged and idle rows; blocks that a step makes whole; queries before and behind the end of a block."""
    own, rings = few_bits(bits, [69, 4, 64], dtype)
    starts, params = torch.zeros(3, dtype=torch.int64), AttentionParams(WIDE**-0.5, sinks=torch.randn(2))
    for counts in ([62, 0, 63], [5, 1, 1], [2, 3, 0]):
        width = max(counts)
        q, new = torch.randn(3, width, 2, WIDE), tuple(torch.randn(3, width, 1, WIDE) + i for i in (1, 0))
        poisoned = tuple(each.clone() for each in new)
        for each in poisoned:
            for row, count in enumerate(counts):
                each[row, count:] = torch.nan
        given = starts, torch.tensor(counts), params, mask
        y = attention.attend_codes(q, (poisoned[0], poisoned[1]), own, *given, dtype)
        with dispatch.references():
            expected = attend_quantized(q, (new[0], new[1]), None, rings, *given, dtype=dtype)
        for row, count in enumerate(counts):
            torch.testing.assert_close(y[row, :count], expected[row, :count], rtol=0, atol=2 * max(CLOSE[dtype], 1e-5))
            assert not y[row, count:].any()
        starts = starts + torch.tensor(counts)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_codes_of_blocks_have_the_same_bits_for_any_cut_and_neighbor(bits: int) -> None:
    length, params, mask, pieces = 130, AttentionParams(0.2), CausalMask(), []
    k, v, q = (torch.randn(2, length, heads, WIDE) for heads in (1, 1, 2))
    both, starts, counts = few_bits(bits, [length, 66], torch.bfloat16)[0], torch.zeros(2).long(), [length, 66]
    whole = attention.attend_codes(q, (k, v), both, starts, torch.tensor(counts), params, mask, torch.bfloat16)
    kv, first = few_bits(bits, [length], torch.bfloat16)[0], 0
    for count in (1, 62, 1, 20, 44, 2):
        some = slice(first, first + count)
        given = (k[:1, some], v[:1, some]), kv, torch.tensor([first]), torch.tensor([count]), params, mask
        pieces.append(attention.attend_codes(q[:1, some], *given, torch.bfloat16))
        first += count
    assert torch.equal(torch.cat(pieces, 1), whole[:1])
