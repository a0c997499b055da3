"""Products in tiles of AMX beside the same library without them."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from torch import Tensor

import lmstate.ops as ops
from lmstate.ops.cpu import variants
from lmstate.ops.cpu.dense import DenseBodies
from tests.ops.helpers import stored


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> tuple[DenseBodies, DenseBodies]:
    """Products with tiles, and without: a library asks once, so each is a copy of the file."""
    if "avx512" not in variants.usable():
        pytest.skip("this processor does not run the variant with AVX-512")
    both = []
    for asked in ("1", "0"):
        copy = tmp_path_factory.mktemp("native") / f"tiles_{asked}.so"
        shutil.copy(variants.path_of("avx512"), copy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LMSTATE_AMX", asked)
            both.append(DenseBodies(ctypes.CDLL(str(copy))))
    if not both[0].uses_amx:
        pytest.skip("this processor has no AMX, or the system does not let us use it")
    assert not both[1].uses_amx
    return both[0], both[1]


def product(body: DenseBodies, x: Tensor, weight: ops.Weight) -> Tensor:
    return body.linear(x, weight, None, None, 0, None)


GROUPED = ("int4", "int8", "int4/8", "int8/8")


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("shape", [(1, 32), (16, 64), (35, 96), (70, 608), (200, 2048)])
def test_tiles_give_the_bits_of_vectors(
    bodies: tuple[DenseBodies, DenseBodies], kind: str, shape: tuple[int, int]
) -> None:
    tiles, vectors = bodies
    weight = stored(torch.randn(shape) * 0.1, kind)
    x = torch.randn(250, shape[1]) * torch.logspace(-6, 6, 250)[:, None]
    x[3, 5], x[17, 0], x[40, -1], x[41] = torch.nan, torch.inf, -torch.inf, 0
    for rows in (*range(1, 71), 250):
        got, want = product(tiles, x[:rows], weight), product(vectors, x[:rows], weight)
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    assert not got[3].isfinite().any() and got[4].isfinite().all()


@pytest.mark.parametrize("kind", GROUPED)
def test_extreme_integers_do_not_overflow(bodies: tuple[DenseBodies, DenseBodies], kind: str) -> None:
    """The largest sums that there are: all activations and all weights of a group at their limits."""
    matrix = torch.ones(16, 64)
    matrix[:, ::32], matrix[8:] = -1, -matrix[8:]
    weight, x = stored(matrix, kind), torch.full((33, 64), 3.0)
    x[1::2] = -x[1::2]
    got, want = (product(body, x, weight) for body in bodies)
    assert torch.equal(got, want)
    torch.testing.assert_close(got, x @ weight.dequantize().T, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("kind", [*GROUPED, "bfloat16", "bfloat12"])
def test_norm_gate_residual_and_threads_leave_the_bits(bodies: tuple[DenseBodies, DenseBodies], kind: str) -> None:
    weight, x, gated = stored(torch.randn(300, 128), kind), torch.randn(40, 128), torch.randn(40, 256)
    norm, residual = ops.Norm(torch.rand(128), 1e-5), ops.Residual(torch.randn(40, 300), scale=0.3)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for body in bodies if kind.startswith("int") else bodies[:1]:  # these two have other bits
                normed = body.linear(x, weight, torch.arange(300.0), norm, 0, residual)
                results.append(torch.stack([normed, body.linear(gated, weight, None, None, 1, residual)]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", ["bfloat16", "bfloat12"])
@pytest.mark.parametrize("shape", [(70, 64), (50, 320), (200, 1152), (37, 4160)])
def test_a_sum_depends_on_its_row_and_its_output_alone(
    bodies: tuple[DenseBodies, DenseBodies], kind: str, shape: tuple[int, int]
) -> None:
    """Whatever stands in the other rows and columns of a tile, numbers that are none included, and however many."""
    tiles, outputs = bodies[0], shape[0]
    matrix = (torch.randn(shape) * torch.logspace(-3, 3, outputs)[:, None]).bfloat16().float()
    matrix[:, 7] *= 2.0**-100  # not in the table of a 12-bit weight
    x = torch.randn(450, shape[1])
    weight = stored(matrix, kind)
    alone = torch.cat([product(tiles, row[None], weight) for row in x[:20]])
    assert alone.isfinite().all()
    for rows in (2, 3, 15, 16, 17, 33, 48, 70, 400, 450):
        among = x[torch.arange(rows) % 450].clone()
        among[1::2] = torch.tensor([torch.nan, torch.inf, 1e30]).repeat(225)[: rows // 2, None]
        among[-1] = x[5]
        got = product(tiles, among, weight)
        even = torch.arange(0, min(rows, 20), 2)
        even = even[even < rows - 1]
        assert torch.equal(got[even], alone[even]) and torch.equal(got[-1], alone[5])
    for count in (1, 15, 16, 33, outputs) if kind == "bfloat16" else ():  # which numbers are rare, all outputs decide
        turned = matrix.flip(0)[:count]
        turned[1::2] = 1e30
        got = product(tiles, x[:20], stored(turned, kind))
        assert torch.equal(got[:, ::2], alone.flip(1)[:, :count:2])


@pytest.mark.parametrize("kind", ["bfloat16", "bfloat12"])
def test_bfloat16_in_tiles_is_the_product_of_rounded_activations(
    bodies: tuple[DenseBodies, DenseBodies], kind: str
) -> None:
    weight, x = stored(torch.randn(100, 1216) * 0.1, kind), torch.randn(90, 1216)
    want = x.bfloat16().double() @ weight.dequantize().double().T
    torch.testing.assert_close(product(bodies[0], x, weight).double(), want, atol=5e-5, rtol=2e-5)
    same = x.bfloat16().float()  # nothing is rounded: what is left is the order of sums
    torch.testing.assert_close(product(bodies[0], same, weight), product(bodies[1], same, weight), atol=5e-5, rtol=2e-5)


def test_inputs_that_no_tile_takes_are_not_rounded(bodies: tuple[DenseBodies, DenseBodies]) -> None:
    weight, x = stored(torch.randn(40, 50), "bfloat16"), torch.randn(20, 50)
    assert torch.equal(product(bodies[0], x, weight), product(bodies[1], x, weight))
