"""Products: every native variant against float32 arithmetic, alone and with what surrounds them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lmstate.ops as ops
from lmstate.ops import dispatch
from lmstate.ops.dense.gemm import gemm
from lmstate.ops.dense.linear import linear_reference
from lmstate.ops.dense.norm import norm_reference
from tests.ops.helpers import stored

KINDS = ("float32", "bfloat16", "bfloat12", "float16", "int8", "int4", "int8/8", "int4/8")
SHAPES = ((48, 64), (50, 96), (7, 32), (33, 50), (1, 160), (21, 192))


def rounded_activations(x: Tensor, weight: ops.Weight) -> Tensor:
    """What a product multiplies: x in one byte or in two in groups of 32, where the weight is quantized."""
    if weight.kind not in ("int8", "int4"):
        library, pairs = dispatch.choice().library, weight.kind.startswith("bfloat16") and x.shape[-1] % 32 == 0
        return x.bfloat16().float() if pairs and library is not None and library.dense.rounds_to_bf16 else x
    groups = x.unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    scaled = groups * torch.div(torch.tensor(127.0), largest)
    first = scaled.round()
    if weight.activations == 8:
        return (first * (largest / 127)).flatten(-2)
    rounded = first + ((scaled - first) * 256).round().clamp(-127, 127) / 256
    return (rounded * (largest / 127)).flatten(-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_equals_float_arithmetic_on_the_rounded_activations(
    variant: str, kind: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    weight = stored(torch.randn(shape) * 0.1, kind)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32):
        x = torch.randn(rows, shape[1])
        want = rounded_activations(x, weight).double() @ weight.dequantize().double().T
        torch.testing.assert_close(ops.linear(x, weight).double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bias_norm_gate_and_residual_equal_the_reference(variant: str, kind: str) -> None:
    torch.manual_seed(0)
    n, k = 40, 96
    weight = stored(torch.randn(n, k) * 0.1, kind)
    library = dispatch.choice().library
    pairs = kind in ("bfloat16", "bfloat12") and library is not None and library.dense.rounds_to_bf16
    tolerance = 1e-3 if kind.startswith("int") else 0.03 if pairs else 2e-5
    x, gated = torch.randn(2, 3, k), torch.randn(2, 3, 2 * k)
    bias, residual = torch.randn(n), ops.Residual(torch.randn(2, 3, n), scale=0.3)
    norms = [
        ops.Norm(torch.rand(k), 1e-5),
        ops.Norm(torch.rand(k), 1e-5, "layer", torch.randn(k)),
        ops.Norm(torch.rand(k), 1e-5, "rms", torch.randn(k)),
    ]
    cases = [(x, {"bias": bias, "residual": residual, "norm": norm}) for norm in norms]
    cases += [(gated, {"gate": act, "residual": residual}) for act in (*ops.ACTIVATIONS, "swigluoai")]
    cases += [(gated, {"gate": "silu", "norm": ops.Norm(torch.rand(2 * k), 1e-5)})]
    for given, arguments in cases:
        want = linear_reference(given, weight, **arguments)
        torch.testing.assert_close(ops.linear(given, weight, **arguments), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [False, True])
def test_a_norm_and_a_factor_before_the_residual_are_what_they_are_apart(variant: str, kind: str, layer: bool) -> None:
    torch.manual_seed(0)
    weight, x, stream = stored(torch.randn(40, 96) * 0.1, kind), torch.randn(2, 3, 96), torch.randn(2, 3, 40)
    after = ops.Norm(torch.rand(40) + 0.5, 1e-5, "layer" if layer else "rms", torch.randn(40) if layer else None)
    bias, before = torch.randn(40), ops.Norm(torch.rand(96), 1e-5)
    for norm, scale in ((None, 0.3), (after, 1.0), (after, 0.3)):
        got = ops.linear(x, weight, bias, norm=before, residual=ops.Residual(stream, norm, scale))
        apart = ops.linear(x, weight, bias, norm=before)
        assert torch.equal(got, stream + (apart if norm is None else ops.norm(apart, norm)) * scale)
        want = stream + (apart if norm is None else norm_reference(apart, norm)) * scale
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [128, 96, 50])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(variant: str, kind: str, k: int) -> None:
    torch.manual_seed(0)
    weight, norm = stored(torch.randn(35, k), kind), ops.Norm(torch.rand(k), 1e-5)
    x, residual, after = torch.randn(32, k), torch.randn(32, 35), ops.Norm(torch.rand(35), 1e-5)

    def onto(some: slice) -> ops.Residual:
        return ops.Residual(residual[some], after, 0.3)

    alone = torch.cat([ops.linear(x[m : m + 1], weight, norm=norm, residual=onto(slice(m, m + 1))) for m in range(32)])
    for rows in range(2, 33):
        assert torch.equal(ops.linear(x[:rows], weight, norm=norm, residual=onto(slice(rows))), alone[:rows])
        assert torch.equal(ops.linear(x[-rows:], weight, norm=norm, residual=onto(slice(-rows, None))), alone[-rows:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "rows"), [(608, 41), (672, 200), (1120, 203), (4128, 390), (1101, 47)])
def test_a_row_has_the_same_bits_beside_hundreds_and_over_many_inputs(
    variant: str, kind: str, k: int, rows: int
) -> None:
    """Where weights are packed, inputs are summed in several parts, and rows taken in several runs."""
    torch.manual_seed(0)
    if kind.startswith(("int", "bfloat12")) and k % 64:
        k -= k % 64
    weight, x = stored(torch.randn(37, k) * 0.1, kind), torch.randn(rows, k)
    together = ops.linear(x, weight)
    picked = [0, 1, 5, 6, 11, 12, rows // 2, rows - 2, rows - 1]
    for m in picked:
        assert torch.equal(together[m : m + 1], ops.linear(x[m : m + 1], weight))
    want = rounded_activations(x[picked], weight).double() @ weight.dequantize().double().T
    torch.testing.assert_close(together[picked].double(), want, atol=2e-4, rtol=2e-5)


def test_threads_do_not_change_a_bit(variant: str) -> None:
    threads = torch.get_num_threads()
    x = torch.randn(5, 256)
    try:
        for kind in KINDS:
            weight = stored(torch.randn(200, 256), kind)
            results = []
            for n in (1, 2, 3):
                torch.set_num_threads(n)
                results.append(ops.linear(x, weight))
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normed", [False, True])
def test_what_threads_share_of_many_rows_is_done_once(variant: str, kind: str, normed: bool) -> None:
    """The last eighth of a thread's outputs is made by whoever comes first: all are written, with the same bits."""
    torch.manual_seed(0)
    weight, x = stored(torch.randn(3100, 64) * 0.1, kind), torch.randn(100, 64)
    norm, threads, found = ops.Norm(torch.rand(64), 1e-5) if normed else None, torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 4):
            torch.set_num_threads(n)
            found.append(ops.linear(x, weight, norm=norm, out=torch.full((100, 3100), torch.nan)))
    finally:
        torch.set_num_threads(threads)
    assert not found[0].isnan().any() and all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_vanish_in_the_rounding(variant: str, bad: float) -> None:
    for kind in KINDS:
        weight = stored(torch.rand(16, 64) + 0.1, kind)
        x = torch.randn(2, 64)
        x[0, 40] = bad
        y = ops.linear(x, weight)
        assert not y[0].isfinite().any() and y[1].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_product_without_native_bodies_stays_close(kind: str, scale: float) -> None:
    torch.manual_seed(0)
    weight = stored(torch.randn(50, 64) * 0.1, kind)
    x, residual = torch.randn(40, 64), ops.Residual(torch.randn(40, 50), scale=scale)
    tolerance = 1e-5 if kind == "float32" else 0.03
    want = linear_reference(x, weight, residual=residual)
    torch.testing.assert_close(gemm(x, weight, residual=residual), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 40])
def test_a_product_cut_beside_something_is_the_product(variant: str, kind: str, rows: int) -> None:
    torch.manual_seed(0)
    weight, x, beside = stored(torch.randn(70, 64), kind), torch.randn(1, rows, 64), torch.randn(1, rows, 5)
    whole = ops.linear(x, weight)
    first, rest = ops.linear_split_concat(x, weight, 33, beside)
    assert torch.equal(first[..., 33:], beside) and first.shape[-1] == 38
    assert torch.equal(torch.cat([first[..., :33], rest], dim=-1), whole)


def test_a_gradient_goes_through_the_reference(variant: str) -> None:
    x = torch.randn(2, 64, requires_grad=True)
    weight = stored(torch.randn(16, 64), "int4")
    ops.linear(x, weight, norm=ops.Norm(torch.ones(64), 1e-5)).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_errors_say_what_does_not_fit(variant: str) -> None:
    weight = stored(torch.randn(16, 64), "int4")
    with pytest.raises(ValueError, match="x is float32 of 64 features"):
        ops.linear(torch.randn(2, 32), weight)
    with pytest.raises(ValueError, match="x is float32 of 128 features"):
        ops.linear(torch.randn(2, 64), weight, gate="silu")
    with pytest.raises(ValueError, match=r"bias must be contiguous float32 \[16\]"):
        ops.linear(torch.randn(2, 64), weight, torch.randn(15))
    with pytest.raises(ValueError, match="residual must be"):
        ops.linear(torch.randn(2, 64), weight, residual=ops.Residual(torch.randn(1, 16)))
    with pytest.raises(ValueError, match="no activation is called 'swish'"):
        ops.linear(torch.randn(2, 128), weight, gate="swish")


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_at_their_limits_are_summed_exactly(variant: str, kind: str, sign: int) -> None:
    """Weights and activations of a group at the ends of their ranges, where sums of 16 bits would saturate."""
    n, k = 16, 64
    if kind == "int4":
        q = torch.tensor([15, 0]).repeat_interleave(8).to(torch.uint8)[:, None].repeat(1, k)
        weight: ops.Weight = ops.Int4Weight.pack(q, torch.ones(n, 2), torch.zeros(n, 2)).with_activations(8)
    else:
        signed = torch.tensor([-128, 127]).repeat_interleave(8).to(torch.int8)[:, None].repeat(1, k)
        weight = ops.Int8Weight.pack(signed, torch.ones(n, 2)).with_activations(8)
    x = torch.full((9, k), 127.0 * sign)
    x[1::2, ::2] *= -1
    assert torch.equal(ops.linear(x, weight), x @ weight.dequantize().T)


def test_activations_of_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="activations of 4 bits"):
        ops.quantize(torch.randn(16, 64), "int4").with_activations(4)
    assert ops.quantize(torch.randn(16, 64), "bfloat16").with_activations(8).activations is None
