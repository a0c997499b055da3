"""Each kernel gives its reference's numbers, and the same bits for any cut, neighbor and tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops.attention.attend import attend_reference
from lmstate.ops.attention.attend_latent import attend_latent_reference
from lmstate.ops.attention.rope import rope_reference
from lmstate.ops.cuda import attention, configs, dense, device, recurrent
from lmstate.ops.dense.activations import glu_reference
from lmstate.ops.dense.norm import norm_reference
from lmstate.ops.recurrent import causal_conv, gated_delta_rule, ssd
from lmstate.ops.types.block_table import BLOCK_TOKENS, RowBlocks
from lmstate.ops.types.params import AttentionParams, CausalMask, Norm, Residual
from lmstate.ops.types.recurrences import DeltaOperands, SSDOperands
from lmstate.ops.types.slab_table import SlabRows, SlabTable
from lmstate.ops.types.slabs import BufferShape, Slabs
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.grouped import FloatWeight, quantize
from tests.interpreted.standin import interpreted_gpu
from tests.other_device import DEVICE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def tables(lengths: Sequence[int], shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[SlabTable]:
    """Tables of rows of so many positions, `(K, D)` each; see `slab_tables`."""
    return slab_tables(lengths, [BufferShape((heads,), width, dtype) for heads, width in shapes])


def slab_tables(lengths: Sequence[int], shapes: Sequence[BufferShape]) -> list[SlabTable]:
    """Tables of rows whose blocks lie in no order; free places hold NaN, or -128 and 255 where they are codes."""
    slabs = Slabs(shapes, torch.device("cpu"))
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    blocks = slabs.take(sum(counts), zeroed=True)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = iter([blocks[i] for i in order])
    rows = [RowBlocks(tuple(next(shuffled) for _ in range(count))) for count in counts]
    places = SlabRows(rows)
    pointers = np.zeros((len(rows), max(counts)), dtype=np.int64)
    made = []
    for buffer, (heads, width, dtype) in enumerate(shapes):
        for row in rows:
            for block in row.blocks:
                block.tensors[buffer].fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min or 255)
        made.append(SlabTable(places, buffer, pointers, heads[0], width, torch.empty(0, dtype=dtype)))
    return made


def stored(lengths: Sequence[int], k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[SlabTable, SlabTable]:
    """Tables that hold the first `lengths[r]` positions of `k` and `v` `[R, S, K, D]`."""
    keys, values = tables(lengths, [(k.shape[2], k.shape[3]), (v.shape[2], v.shape[3])], dtype)
    counts = torch.tensor(lengths)
    keys.write(k, torch.zeros_like(counts), counts)
    values.write(v, torch.zeros_like(counts), counts)
    return keys, values


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_tokens_are_stored_rounded_in_their_blocks(dtype: torch.dtype) -> None:
    (table,) = tables([130, 64], [(2, 12)], dtype)
    new, starts, counts = torch.randn(2, 5, 2, 12), torch.tensor([62, 63]), torch.tensor([5, 1])
    attention.append(new, table, starts, counts)
    held = table.blocks
    assert torch.equal(held[0][0][:, 62:], new[0, :2].transpose(0, 1).to(dtype))
    assert torch.equal(held[0][1][:, :3], new[0, 2:].transpose(0, 1).to(dtype))
    assert torch.equal(held[1][0][:, 63:], new[1, :1].transpose(0, 1).to(dtype))
    assert held[0][0][:, :62].isnan().all() and held[0][1][:, 3:].isnan().all()


def rings(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return k.to(dtype).transpose(1, 2).contiguous(), v.to(dtype).transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mask", "softcap", "of_heads"),
    [
        (CausalMask(), None, ""),
        (CausalMask(window=70), None, "sinks"),
        (CausalMask(chunk=96), 5.0, ""),
        (CausalMask(), None, "slopes"),
    ],
)
def test_attention_of_ragged_rows(dtype: torch.dtype, mask: CausalMask, softcap: float | None, of_heads: str) -> None:
    lengths, counts = [5, 600, 130], torch.tensor([5, 3, 0])
    k, v, q = torch.randn(3, 600, 3, 24), torch.randn(3, 600, 3, 20), torch.randn(3, 5, 6, 24)
    params = AttentionParams(24**-0.5, softcap, **({of_heads: torch.rand(6) / 20} if of_heads else {}))
    starts = torch.tensor(lengths) - counts
    y = attention.attend(q, *stored(lengths, k, v, dtype), starts, counts, params, mask)
    expected = attend_reference(q, *rings(k, v, dtype), starts, counts, params, mask)
    torch.testing.assert_close(y, expected, rtol=0, atol=CLOSE[dtype])
    assert not y[0, 5:].any() and not y[1, 3:].any() and not y[2].any()


@pytest.mark.parametrize("window", [None, 100])
def test_attention_has_the_same_bits_for_any_cut_and_neighbor(window: int | None) -> None:
    length, mask, params = 700, CausalMask(window), AttentionParams(0.25)
    k, v, q = torch.randn(1, length, 1, 16), torch.randn(1, length, 1, 16), torch.randn(1, length, 2, 16)
    keys, values = stored([length], k, v, torch.bfloat16)
    whole = attention.attend(q[:, 600:], keys, values, torch.tensor([600]), torch.tensor([100]), params, mask)
    for first, count in ((600, 1), (630, 7), (663, 37), (699, 1)):
        part = q[:, first : first + count]
        y = attention.attend(part, keys, values, torch.tensor([first]), torch.tensor([count]), params, mask)
        assert torch.equal(y, whole[:, first - 600 : first - 600 + count])
    both_k, both_v = stored([length, 300], k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), torch.bfloat16)
    beside = torch.cat([q[:, 650:653], torch.randn(1, 3, 2, 16)])
    starts, counts = torch.tensor([650, 298]), torch.tensor([3, 2])
    y = attention.attend(beside, both_k, both_v, starts, counts, params, mask)
    assert torch.equal(y[:1], whole[:, 50:53])


def test_torch_multiplies_many_rows_where_bits_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with interpreted_gpu(monkeypatch) as gpu:
        weight, x = weights("bfloat16", 40, 96).to(DEVICE), torch.randn(128, 96).to(DEVICE)
        kept = ops.linear(x, weight)
        monkeypatch.setenv("LMSTATE_GPU_BITS", "0")
        few, many = ops.linear(x[1:], weight), ops.linear(x, weight)
        opened = ops.feed_forward(x, weight, weights("float16", 40, 20).to(DEVICE), "silu")
        assert gpu.launches == ["product", "product", "glu"] and opened.shape == (128, 40)
        torch.testing.assert_close(many, kept, rtol=1e-2, atol=1e-1)
        assert torch.equal(few, kept[1:])


def test_no_grid_is_wider_than_a_gpu_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and third sizes of a grid are at most 65,535, whatever the text's length."""
    tokens, grids = 70_000, []
    monkeypatch.setattr(attention, "launch", lambda kernel, grid, *args, **constants: grids.append(grid))
    latent, rope = (tables([tokens], [(1, 16)], torch.bfloat16)[0] for _ in range(2))
    starts, counts = torch.tensor([0]), torch.tensor([tokens])
    attention.append(torch.empty(1, tokens, 1, 16), latent, starts, counts)
    q = torch.empty(1, tokens, 64, 16)
    attention.attend_latent(q, q, latent, rope, starts, counts, 1.0, None)
    assert len(grids) == 2 and all(size <= 65_535 for grid in grids for size in grid[1:])


def test_keys_and_values_of_two_dtypes_go_to_the_reference() -> None:
    (one,), (other,) = (tables([5], [(1, 16)], dtype) for dtype in (torch.bfloat16, torch.float16))
    assert attention.can_read(one, one) and not attention.can_read(one, other)


def test_a_kernel_is_given_tensors_that_begin_at_multiples_of_16_bytes() -> None:
    """Else it would be compiled again, for other vectors and another order of sums."""

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: given.extend(args)

    given: list[Any] = []
    x = torch.randn(9)
    device.launch(Kernel(), (1,), x, x[1:], 7)
    assert given[0] is x and torch.equal(given[1], x[1:]) and given[1].data_ptr() % 16 == 0 and given[2] == 7


def test_merged_parts_are_those_that_one_program_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v, q = torch.randn(1, 1100, 2, 16), torch.randn(1, 1100, 2, 16), torch.randn(1, 2, 4, 16)
    held = stored([1100], k, v, torch.float32)
    given = (q, *held, torch.tensor([1098]), torch.tensor([2]), AttentionParams(0.3), CausalMask())
    merged = attention.attend(*given)
    monkeypatch.setattr(attention, "PARTS_AT_MOST", 0)
    assert torch.equal(attention.attend(*given), merged)


@pytest.mark.parametrize("window", [None, 90])
def test_latent_attention(window: int | None) -> None:
    lengths, counts = [200, 70], torch.tensor([4, 2])
    latent, rope_key = torch.randn(2, 200, 1, 48), torch.randn(2, 200, 1, 8)
    held = stored(lengths, latent, rope_key, torch.float32)
    q, q_rope, starts = torch.randn(2, 4, 5, 48), torch.randn(2, 4, 5, 8), torch.tensor(lengths) - counts
    y = attention.attend_latent(q, q_rope, *held, starts, counts, 0.2, window)
    expected = attend_latent_reference(
        q, q_rope, latent[:, :, 0], rope_key[:, :, 0], starts, counts, scale=0.2, window=window
    )
    torch.testing.assert_close(y, expected, rtol=0, atol=5e-6)
    one = attention.attend_latent(q[:, 1:2], q_rope[:, 1:2], *held, starts + 1, torch.ones(2).long(), 0.2, window)
    assert torch.equal(one, y[:, 1:2])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved: bool) -> None:
    x, angles = torch.randn(2, 3, 5, 20), torch.randn(2, 3, 6)
    y = attention.rope(x, angles.cos(), angles.sin(), interleaved)
    torch.testing.assert_close(y, rope_reference(x, angles.cos(), angles.sin(), interleaved), rtol=0, atol=1e-6)


def weights(kind: str, outputs: int, inputs: int) -> Weight:
    matrix = torch.randn(outputs, inputs)
    return quantize(matrix, kind) if kind.startswith("int") else FloatWeight(matrix.to(getattr(torch, kind)))


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int4", "int8"])
def test_products_and_their_bits_for_any_number_of_rows(kind: str) -> None:
    weight, x = weights(kind, 83, 160), torch.randn(70, 160)
    bias, stream = torch.randn(83), torch.randn(70, 83)
    y = dense.linear(x, weight, bias, Residual(stream, None, 0.5))
    dtype = torch.bfloat16 if kind.startswith("int") else getattr(torch, kind)
    expected = stream + 0.5 * (x.to(dtype).float() @ weight.dequantize(dtype).float().T + bias)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    for first, last in ((0, 1), (3, 20), (69, 70)):
        part = dense.linear(x[first:last], weight, bias, Residual(stream[first:last], None, 0.5))
        assert torch.equal(part, y[first:last])


@pytest.mark.parametrize("kind", ["bfloat16", "int4", "int8"])
def test_every_tile_of_a_product_gives_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weights(kind, 2 * 83, 96), torch.randn(130, 96)
    y, opened = dense.linear(x, weight, None, None), dense.linear_glu(x, weight, None, "silu")
    tiles = {configs.product(130, 166, 2)}
    for programs in (256, 4):
        monkeypatch.setattr(configs, "PROGRAMS", programs)
        for rows in (1, 20, 70):
            tiles.add(configs.product(rows, 166, 2))
            assert torch.equal(dense.linear(x[:rows], weight, None, None), y[:rows])
            assert torch.equal(dense.linear_glu(x[:rows], weight, None, "silu"), opened[:rows])
    assert {shape.rows for shape in tiles} == {shape.outputs for shape in tiles} == {16, 32, 64, 128}


@pytest.mark.parametrize("shape", [(90,), (4, 90)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("biased", [False, True])
def test_norms(shape: tuple[int, ...], kind: Literal["rms", "layer"], biased: bool) -> None:
    x, own = torch.randn(3, 4, 90) + 1, Norm(torch.randn(shape), 1e-5, kind, torch.randn(shape) if biased else None)
    y = dense.norm(x, own)
    torch.testing.assert_close(y, norm_reference(x, own), rtol=1e-6, atol=2e-6)
    assert torch.equal(dense.norm(x[1:2], own), y[1:2])


def test_gates() -> None:
    x = torch.randn(3, 4, 90)
    for act in dense.GATES:
        torch.testing.assert_close(dense.glu(x, act), glu_reference(x, act), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_of_each_head_with_its_matrix(dtype: torch.dtype) -> None:
    x, matrices = torch.randn(2, 37, 3, 70), (torch.randn(3, 70, 90) / 8).to(dtype)
    y = dense.per_head_matmul(x, matrices)
    expected = torch.einsum("rtha,hab->rthb", x.to(dtype).float(), matrices.float())
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for first, last in ((0, 1), (3, 20), (36, 37)):
        assert torch.equal(dense.per_head_matmul(x[1:, first:last], matrices), y[1:, first:last])


CUTS = ([9], [1] * 9, [4, 5], [1, 7, 1])


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_gated_delta_rule(by_channel: bool) -> None:
    q, k = torch.randn(2, 9, 2, 24), torch.randn(2, 9, 2, 24)
    v, beta, carry = torch.randn(2, 9, 4, 20), torch.rand(2, 9, 4), torch.randn(2, 4, 24, 20)
    g = -torch.rand(2, 9, 4, 24) if by_channel else -torch.rand(2, 9, 4)
    counts = torch.tensor([9, 5])
    y, new = recurrent.gated_delta_rule(DeltaOperands(q, k, v, g, beta, carry, counts, 0.2, True))
    for r, count in enumerate(counts.tolist()):
        given = tuple(x[r : r + 1, :count] for x in (q, k, v, g, beta))
        expected, end = gated_delta_rule.recurrent(*given, carry[r : r + 1], scale=0.2, normalize=True)
        torch.testing.assert_close(y[r : r + 1, :count], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(new[r : r + 1], end, rtol=1e-5, atol=1e-5)
        assert not y[r, count:].any()
    for cut in CUTS:
        first, state, pieces = 0, carry[:1], []
        for size in cut:
            some = tuple(x[:1, first : first + size] for x in (q, k, v, g, beta))
            piece, state = recurrent.gated_delta_rule(DeltaOperands(*some, state, torch.tensor([size]), 0.2, True))
            pieces.append(piece)
            first += size
        assert torch.equal(torch.cat(pieces, 1), y[:1]) and torch.equal(state, new[:1])


def test_linear_attention() -> None:
    q, k, v = torch.randn(1, 6, 2, 16), torch.randn(1, 6, 2, 16), torch.randn(1, 6, 2, 20)
    g, state = -torch.rand(1, 6, 2), torch.randn(1, 2, 16, 20)
    y, new = recurrent.gated_delta_rule(DeltaOperands(q, k, v, g, None, state, torch.tensor([6]), 1.0, False))
    for t in range(6):
        state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
        torch.testing.assert_close(y[:, t], (q[:, t, :, None] @ state)[:, :, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(new, state, rtol=1e-5, atol=1e-5)


def test_the_state_space_of_mamba_2() -> None:
    x, dt, A, D = torch.randn(2, 9, 4, 20), torch.randn(2, 9, 4), -torch.rand(4), torch.randn(4)
    B, C, carry, bias = torch.randn(2, 9, 2, 24), torch.randn(2, 9, 2, 24), torch.randn(2, 4, 20, 24), torch.randn(4)
    counts = torch.tensor([9, 4])
    given = (A, B, C, D)
    y, new = recurrent.ssd(SSDOperands(x, dt, *given, carry, counts, bias, (0.0, float("inf"))))
    expected, end = ssd.ssd(x, dt, *given, carry, counts, dt_bias=bias)
    torch.testing.assert_close(y[1, :4], expected[1, :4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(new, end, rtol=1e-5, atol=1e-5)
    for cut in CUTS:
        first, state, pieces = 0, carry[:1], []
        for size in cut:
            here = slice(first, first + size)
            some = (x[:1, here], dt[:1, here], A, B[:1, here], C[:1, here], D, state, torch.tensor([size]))
            piece, state = recurrent.ssd(SSDOperands(*some, bias, (0.0, float("inf"))))
            pieces.append(piece)
            first += size
        assert torch.equal(torch.cat(pieces, 1), y[:1]) and torch.equal(state, new[:1])


@pytest.mark.parametrize("taps", [2, 4])
def test_causal_convolutions(taps: int) -> None:
    x, tail, weight, bias = torch.randn(2, 9, 70), torch.randn(2, taps - 1, 70), torch.randn(70, taps), torch.randn(70)
    counts = torch.tensor([9, 2])
    y, new = recurrent.causal_conv(x, tail, weight, bias, counts, True)
    expected, end = causal_conv.causal_conv(x, tail, weight, bias, counts, "silu")
    torch.testing.assert_close(y[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y[1, :2], expected[1, :2], rtol=1e-5, atol=1e-6)
    assert torch.equal(new, end)
    for cut in CUTS:
        first, state, pieces = 0, tail[:1], []
        for size in cut:
            some = (x[:1, first : first + size], state, weight, bias, torch.tensor([size]), True)
            piece, state = recurrent.causal_conv(*some)
            pieces.append(piece)
            first += size
        assert torch.equal(torch.cat(pieces, 1), y[:1]) and torch.equal(state, new[:1])
