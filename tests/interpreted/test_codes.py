"""Attention over keys and values of 8 bits, in blocks of slabs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmstate.ops.attention.attend import attend_reference
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
