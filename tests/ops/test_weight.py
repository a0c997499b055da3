"""Weights: packing keeps every number, and what comes back is what was put in."""

from __future__ import annotations

import pytest
import torch

import lmstate.ops as ops
from lmstate.ops.weights.grouped import weight_from_tensors

SHAPES = ((16, 32), (50, 96), (1, 64), (33, 320))


def halves(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 0.1).half().float()


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_packing_keeps_every_number(variant: str, shape: tuple[int, int]) -> None:
    n, k = shape
    q = torch.randint(0, 16, shape, dtype=torch.uint8)
    scale, minimum = halves(n, k // 32), halves(n, k // 32)
    want = (q.view(n, -1, 32) * scale[..., None] + minimum[..., None]).view(n, k)
    torch.testing.assert_close(ops.Int4Weight.pack(q, scale, minimum).dequantize(), want, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_packing_keeps_every_number(variant: str, shape: tuple[int, int]) -> None:
    n, k = shape
    q = torch.randint(-128, 128, shape, dtype=torch.int8)
    scale = halves(n, k // 32)
    want = (q.view(n, -1, 32) * scale[..., None]).view(n, k)
    assert torch.equal(ops.Int8Weight.pack(q, scale).dequantize(), want)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_rows_ranges_and_reloading_give_the_same_matrix(variant: str, kind: str) -> None:
    weight = ops.quantize(torch.randn(50, 96), kind)
    matrix = weight.dequantize()
    ids = torch.tensor([[0, 49], [17, 3]])
    assert torch.equal(weight.rows(ids), matrix[ids])
    assert torch.equal(weight.dequantize(torch.float32, 13, 30), matrix[13:43])
    assert torch.equal(weight.dequantize(torch.bfloat16), matrix.bfloat16())
    again = weight_from_tensors(weight.kind, weight.shape, weight.tensors())
    assert torch.equal(again.dequantize(), matrix) and again.nbytes == weight.nbytes


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_native_and_torch_dequantize_alike(variant: str, kind: str) -> None:
    weight = ops.quantize(torch.randn(40, 64) * 1e-3, kind)  # scales below the smallest normal float16 too
    native = weight.dequantize()
    plain = weight.dequantize(torch.float64)  # anything but float32 and bfloat16 goes through torch
    torch.testing.assert_close(native, plain.float(), atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize(("kind", "levels"), [("int8", 254), ("int4", 15)])
def test_quantizing_errs_by_half_a_step_at_most(kind: str, levels: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(20, 128)
    groups = matrix.view(20, 4, 32)
    span = 2 * groups.abs().amax(-1) if kind == "int8" else groups.amax(-1) - groups.amin(-1)
    error = (ops.quantize(matrix, kind).dequantize() - matrix).view(20, 4, 32).abs().amax(-1)
    # Half a step, and what the rounding of scale and minimum to float16 adds at the ends.
    assert (error <= span / levels * 0.5 + span * 2**-10 + groups.abs().amax(-1) * 2**-10).all()


def test_constant_and_zero_groups_quantize_to_themselves() -> None:
    for value in (0.0, 0.5, -2.0):
        matrix = torch.full((4, 64), value)
        torch.testing.assert_close(ops.quantize(matrix, "int4").dequantize(), matrix)
        torch.testing.assert_close(ops.quantize(matrix, "int8").dequantize(), matrix, atol=1e-3, rtol=1e-3)


def test_a_matrix_without_whole_groups_stays_bfloat16() -> None:
    assert ops.quantize(torch.randn(4, 40), "int4").kind == "bfloat16"


def test_errors_say_what_does_not_fit(variant: str) -> None:
    with pytest.raises(ValueError, match="no weight kind is called 'int3'"):
        ops.quantize(torch.randn(4, 32), "int3")
    with pytest.raises(ValueError, match="K a multiple of 32"):
        ops.Int8Weight.pack(torch.zeros(4, 33, dtype=torch.int8), torch.zeros(4, 1))
    with pytest.raises(ValueError, match="scales and minima"):
        ops.Int4Weight.pack(torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 1), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="pack it again"):
        weight_from_tensors("int4", (16, 32), {"packed": torch.zeros(1, 1, 544, dtype=torch.uint8)})
    with pytest.raises(IndexError):
        ops.quantize(torch.randn(16, 32), "int4").rows(torch.tensor([16]))
