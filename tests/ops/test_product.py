"""The native product of many rows in bfloat16, against the same product in float64."""

import sys

import pytest
import torch
from torch.nn import functional as F

from lmstate import ops
from lmstate.ops import dispatch
from lmstate.ops.cpu import Library
from lmstate.ops.cpu.abi import GATES
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.bfloat12 import to_bfloat12
from lmstate.ops.weights.grouped import quantize

KINDS = ["bfloat16", "float16", "int8", "int4", "squeezed"]


@pytest.fixture
def library() -> Library:
    library = dispatch.choice().library
    if library is None or not library.dense.has_gemm:
        pytest.skip("this processor does not multiply vectors of bfloat16, or whole matrices of them too")
    return library


def stored(matrix: torch.Tensor, kind: str) -> Weight:
    return to_bfloat12(quantize(matrix, "bfloat16")) if kind == "squeezed" else quantize(matrix, kind)


def exact(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    return F.linear(x.double(), weight.dequantize().bfloat16().double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 64), (33, 64, 64), (40, 200, 192), (7, 130, 2048), (65, 16, 576)])
def test_it_is_the_product(library: Library, kind: str, rows: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    weight, x = stored(torch.randn(n, k), kind), torch.randn(rows, k).bfloat16()
    bias, residual, y = torch.randn(n), torch.randn(rows, n), torch.empty(rows, n)
    library.dense.gemm(x, weight, y, bias=bias, residual=residual)
    torch.testing.assert_close(y.double(), exact(x, weight) + bias + residual, atol=1e-4 * k**0.5, rtol=1e-5)


@pytest.mark.parametrize("k", [2, 30, 34, 90])
def test_inputs_need_be_no_whole_vectors(library: Library, k: int) -> None:
    torch.manual_seed(0)
    weight, x, y = stored(torch.randn(50, k), "bfloat16"), torch.randn(35, k).bfloat16(), torch.empty(35, 50)
    library.dense.gemm(x, weight, y)
    torch.testing.assert_close(y.double(), exact(x, weight), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_some_outputs_go_into_some_columns(library: Library, kind: str) -> None:
    torch.manual_seed(0)
    weight, x, y = stored(torch.randn(150, 64), kind), torch.randn(35, 64).bfloat16(), torch.full((35, 120), 7.0)
    library.dense.gemm(x, weight, y[:, 10:110], first=37)
    torch.testing.assert_close(y[:, 10:110].double(), exact(x, weight)[:, 37:137], atol=1e-3, rtol=1e-5)
    assert (y[:, :10] == 7).all() and (y[:, 110:] == 7).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "relu2", "swigluoai"])
@pytest.mark.parametrize("f", [8, 48, 100])
def test_a_gate_takes_both_halves(library: Library, kind: str, act: str, f: int) -> None:
    torch.manual_seed(0)
    weight, x, bias = stored(torch.randn(2 * f, 64) / 8, kind), torch.randn(40, 64).bfloat16(), torch.randn(2 * f)
    y = torch.empty(40, f, dtype=torch.bfloat16)
    library.dense.gemm(x, weight, y, bias=bias, gate=GATES[act])
    want = ops.glu(exact(x, weight).float() + bias, act)
    torch.testing.assert_close(y.float(), want, atol=1e-3, rtol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_whatever_is_beside_it(library: Library, kind: str) -> None:
    torch.manual_seed(0)
    weight, x, threads = stored(torch.randn(200, 320), kind), torch.randn(64, 320), torch.get_num_threads()
    whole = ops.linear(x, weight)
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(ops.linear(x[7:47], weight), whole[7:47])
    finally:
        torch.set_num_threads(threads)


def test_what_does_not_fit_is_refused(library: Library) -> None:
    weight, x = stored(torch.randn(50, 64), "int8"), torch.randn(40, 64).bfloat16()
    good = torch.empty(40, 50)
    for rows, y, more in [
        (x.float(), good, {}),
        (x[:, :32], good, {}),
        (x, good[:30], {}),
        (x, torch.empty(40, 51), {}),
        (x, good, {"first": 1}),
        (x, good.bfloat16(), {}),
        (x, good.T.contiguous().T, {}),
        (x, good, {"gate": 1}),
        (x, good, {"residual": torch.empty(40, 100)[:, ::2]}),
        (x, good, {"bias": torch.empty(49)}),
    ]:
        with pytest.raises(ValueError):
            library.dense.gemm(rows, weight, y, **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchs_product_takes_its_place(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 where the processor does not multiply bfloat16."""
    library = dispatch.choice().library
    if library is None:
        pytest.skip("there is no native library")
    monkeypatch.setattr(library.dense, "has_gemm", False)
    monkeypatch.setattr(
        sys.modules["lmstate.ops.dense.gemm"], "multiplies_bfloat16", lambda device: dtype == torch.bfloat16
    )
    monkeypatch.setattr(sys.modules["lmstate.ops.dense.gemm"], "PANEL", 20 * 64)  # several panels
    torch.manual_seed(0)
    up, down = stored(torch.randn(96, 64) / 8, kind), stored(torch.randn(50, 64) / 8, kind)
    x, bias, residual = torch.randn(40, 64), torch.randn(50), ops.Residual(torch.randn(40, 50))
    want = F.linear(x.double(), down.dequantize().double(), bias.double()) + residual.stream
    close = 0.03 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ops.linear(x, down, bias, residual=residual).double(), want, atol=close, rtol=close)
    inner = stored(torch.randn(30, 48) / 7, "bfloat16")
    want = F.linear(ops.glu(exact(x.bfloat16(), up).float(), "silu"), inner.dequantize())
    torch.testing.assert_close(ops.feed_forward(x, up, inner, "silu"), want, atol=0.05, rtol=0.05)


def test_it_needs_nobody_to_tell_what_the_processor_can(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no /proc/cpuinfo to read, say."""
    x, weight, beside = torch.randn(40, 64), stored(torch.randn(50, 64), "int8"), torch.randn(40, 3)
    want, cut = ops.linear(x, weight), ops.linear_split_concat(x, weight, 20, beside)
    monkeypatch.setattr(sys.modules["lmstate.ops.dense.gemm"], "multiplies_bfloat16", lambda device: False)
    assert torch.equal(ops.linear(x, weight), want)
    assert all(torch.equal(a, b) for a, b in zip(ops.linear_split_concat(x, weight, 20, beside), cut))
