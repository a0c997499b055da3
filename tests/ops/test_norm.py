"""Norms: the reference against the definition, the native bodies against the reference."""

from __future__ import annotations

import pytest
import torch

import lmstate.ops as ops
from lmstate.ops.dense.norm import norm_reference


@pytest.mark.parametrize("width", [1, 7, 16, 50, 576])
def test_rms_norm_equals_its_definition(variant: str, width: int) -> None:
    x, weight = torch.randn(2, 3, width), torch.rand(width)
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(ops.norm(x, ops.Norm(weight, 1e-5)).double(), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(norm_reference(x, ops.Norm(weight, 1e-5)).double(), want, atol=1e-6, rtol=1e-6)


def test_layer_norm_and_biases_equal_torch(variant: str) -> None:
    x, weight, bias = torch.randn(4, 40), torch.rand(40), torch.randn(40)
    want = torch.nn.functional.layer_norm(x, (40,), weight, bias, 1e-5)
    torch.testing.assert_close(ops.norm(x, ops.Norm(weight, 1e-5, "layer", bias)), want)
    plain = ops.norm(x, ops.Norm(weight, 1e-5))
    torch.testing.assert_close(ops.norm(x, ops.Norm(weight, 1e-5, "rms", bias)), plain + bias)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_weights_of_each_head_are_its_own(variant: str, kind: str) -> None:
    x, weight = torch.randn(4, 3, 40), torch.rand(3, 40)
    got = ops.norm(x, ops.Norm(weight, 1e-5, kind))
    for head in range(3):
        torch.testing.assert_close(got[:, head], ops.norm(x[:, head], ops.Norm(weight[head], 1e-5, kind)))


def test_a_strided_input_is_read_by_its_strides(variant: str) -> None:
    x, norm = torch.randn(3, 64, 2), ops.Norm(torch.rand(64), 1e-5)
    strided = x[..., 0]
    torch.testing.assert_close(ops.norm(strided, norm), norm_reference(strided.clone(), norm))


def test_a_row_has_the_same_bits_whatever_stands_beside_it(variant: str) -> None:
    x, norm = torch.randn(2000, 33), ops.Norm(torch.rand(33), 1e-5)
    together = ops.norm(x, norm)
    assert all(torch.equal(ops.norm(x[m : m + 1], norm)[0], together[m]) for m in range(0, 2000, 97))


def test_a_weight_of_another_width_is_refused(variant: str) -> None:
    with pytest.raises(ValueError, match=r"must be contiguous float32 \[32\]"):
        ops.norm(torch.randn(2, 32), ops.Norm(torch.ones(31), 1e-5))
