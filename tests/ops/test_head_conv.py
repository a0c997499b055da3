"""head_conv: a convolution in which every head mixes its own features, against torch's grouped one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops.recurrent.grouped_conv import head_conv
from tests.ops import fold_properties as properties

HEADS, DIM = 3, 5
KERNELS = pytest.mark.parametrize("kernel", [1, 2, 4])


def draw(
    rows: int, width: int, kernel: int, dtype: torch.dtype = torch.float32
) -> tuple[properties.Inputs, properties.Carry]:
    generator = torch.Generator().manual_seed(width)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    return (normal(rows, width, HEADS, DIM),), (normal(rows, kernel - 1, HEADS, DIM),)


def make(kernel: int, dtype: torch.dtype = torch.float32) -> properties.Fold:
    generator = torch.Generator().manual_seed(kernel)
    matrices = torch.randn(HEADS, kernel * DIM, DIM, generator=generator, dtype=dtype)

    def fold(inputs: properties.Inputs, carry: properties.Carry, counts: Tensor) -> tuple[Tensor, properties.Carry]:
        y, tail = head_conv(inputs[0], carry[0], matrices, counts)
        return y, (tail,)

    return fold


@KERNELS
def test_equals_a_grouped_convolution(kernel: int) -> None:
    torch.manual_seed(0)
    peer = torch.nn.Conv1d(HEADS * DIM, HEADS * DIM, kernel, groups=HEADS, bias=False)
    x = torch.randn(2, 9, HEADS, DIM)
    with torch.no_grad():
        wanted = peer(F.pad(x.flatten(2).mT, (kernel - 1, 0))).mT.unflatten(-1, (HEADS, DIM))
        matrices = peer.weight.view(HEADS, DIM, DIM, kernel).permute(0, 3, 2, 1).flatten(1, 2)
        y, tail = head_conv(x, torch.zeros(2, kernel - 1, HEADS, DIM), matrices, torch.tensor([9, 9]))
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(tail, x[:, 9 - (kernel - 1) :])


@KERNELS
@pytest.mark.parametrize("cuts", [(1,) * 20, (3, 4, 1), (33,)])
def test_any_cut_equals_whole(kernel: int, cuts: tuple[int, ...]) -> None:
    properties.check_any_cut_equals_whole(make(kernel), *draw(2, 40, kernel), cuts, 1e-5)


@KERNELS
@pytest.mark.parametrize("width", [1, 3, 7, 40])
def test_ragged_rows_equal_each_row_alone(kernel: int, width: int) -> None:
    tolerance = 0.0 if 4 * width <= 32 else 1e-5  # bit for bit at decode sizes
    properties.check_ragged_equals_alone(
        make(kernel), *draw(4, width, kernel), [0, 1, width, (width + 1) // 2], tolerance
    )  # fmt: skip


@KERNELS
def test_gradients(kernel: int) -> None:
    inputs, carry = draw(2, 6, kernel, torch.float64)
    properties.check_gradients(make(kernel, torch.float64), inputs, carry, [6, 3])


def test_matrices_that_do_not_fit_are_refused() -> None:
    (x,), (tail,) = draw(1, 2, 3)
    with pytest.raises(ValueError, match="needs matrices"):
        head_conv(x, tail, torch.zeros(HEADS, 2 * DIM, DIM), torch.tensor([2]))
