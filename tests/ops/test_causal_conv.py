"""causal_conv: a convolution over the whole stream, however the stream is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops.recurrent.causal_conv import causal_conv, convolve_shifts, convolve_windows
from tests.ops import fold_properties as properties

FEATURES = 6


def make(rows: int, width: int, kernel: int = 4, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(kernel + width)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    weight, bias = draw(FEATURES, kernel), draw(FEATURES)

    def fold(inputs, carry, counts):
        y, tail = causal_conv(inputs[0], carry[0], weight, bias, counts, "silu")
        return y, (tail,)

    return fold, (draw(rows, width, FEATURES),), (draw(rows, kernel - 1, FEATURES),), weight, bias


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 3, 70, 140])
def test_equals_conv1d_over_tail_and_inputs(kernel: int, width: int) -> None:
    fold, inputs, carry, weight, bias = make(2, width, kernel)
    joined = torch.cat([carry[0], inputs[0]], 1)
    wanted = F.silu(F.conv1d(joined.transpose(1, 2), weight[:, None], bias, groups=FEATURES)).transpose(1, 2)
    y, (tail,) = fold(inputs, carry, properties.full(inputs))
    torch.testing.assert_close(y, wanted)
    assert torch.equal(tail, joined[:, width:])


@pytest.mark.parametrize("with_bias", [True, False])
def test_both_bodies_agree(with_bias: bool) -> None:
    _, inputs, carry, weight, bias = make(2, 150)
    joined = torch.cat([carry[0], inputs[0]], 1)
    bias_or_none: Tensor | None = bias if with_bias else None
    torch.testing.assert_close(
        convolve_windows(joined, weight, bias_or_none), convolve_shifts(joined, weight, bias_or_none)
    )


@pytest.mark.parametrize("cuts", [(1,) * 11, (2, 1, 3), (4, 5), (64,), (65, 1)])
def test_any_cut_equals_whole(cuts: tuple[int, ...]) -> None:
    fold, inputs, carry, *_ = make(2, 75)
    properties.check_any_cut_equals_whole(fold, inputs, carry, cuts, 1e-6)


@pytest.mark.parametrize("width", [1, 2, 5, 80])
def test_ragged_rows_equal_each_row_alone(width: int) -> None:
    fold, inputs, carry, *_ = make(4, width)
    properties.check_ragged_equals_alone(fold, inputs, carry, [0, 1, width, width // 2], 1e-6)


def test_gradients() -> None:
    fold, inputs, carry, *_ = make(2, 7, dtype=torch.float64)
    properties.check_gradients(fold, inputs, carry, [7, 2])


def test_a_tail_of_the_wrong_length_is_refused() -> None:
    _, inputs, carry, weight, _ = make(1, 5)
    with pytest.raises(ValueError, match="tail of 3"):
        causal_conv(inputs[0], carry[0][:, 1:], weight, None, torch.tensor([5]))
