"""The largest number of a row: the native bodies against torch."""

from __future__ import annotations

import pytest
import torch

import lmstate.ops as ops


@pytest.mark.parametrize("width", [1, 7, 16, 511, 512, 513, 5000])
def test_the_first_of_the_largest_is_found(variant: str, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randint(-9, 9, (40, width), generator=generator).float()  # many are alike
    x[1] = -torch.inf
    x[2, width // 2] = torch.inf
    x[3, width - 1] = 100
    x[4, width // 3 :] = torch.nan
    x[5:9] = x[5:9].abs().neg() - 1e30
    largest, where = ops.argmax(x[:, :])
    wanted = x.max(-1)
    torch.testing.assert_close(largest, wanted.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(where, wanted.indices)


def test_any_strides_and_no_rows(variant: str) -> None:
    x = torch.randn(300, 3)
    assert torch.equal(ops.argmax(x.T)[1], x.argmax(0))
    assert ops.argmax(torch.empty(0, 5))[1].tolist() == []


def test_another_default_dtype_changes_nothing(variant: str) -> None:
    x = torch.randn(2, 300)
    torch.set_default_dtype(torch.bfloat16)
    try:
        largest, where = ops.argmax(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(largest, x.amax(1)) and torch.equal(where, x.argmax(1))
