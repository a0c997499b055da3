"""Rotary embedding: the reference against complex multiplication, the native bodies against the reference."""

from __future__ import annotations

import pytest
import torch

import lmstate.ops as ops
from lmstate.ops.attention.rope import rope_reference


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot", [4, 10, 24])
def test_rotation_is_complex_multiplication_and_the_rest_passes(variant: str, interleaved: bool, rot: int) -> None:
    x, angle = torch.randn(2, 3, 4, 24), torch.randn(2, 3, rot // 2)
    head = x[..., :rot]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)[:, :, None]
    parts = [turned.real, turned.imag]
    want = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    want = torch.cat([want, x[..., rot:]], -1)
    for rope in (ops.rope, rope_reference):
        torch.testing.assert_close(rope(x, angle.cos(), angle.sin(), interleaved), want, atol=1e-6, rtol=1e-5)


def test_heads_of_a_wider_projection_are_read_in_place(variant: str) -> None:
    qkv, angle = torch.randn(2, 3, 9, 16), torch.randn(1, 3, 8).expand(2, 3, 8)
    got = ops.rope(qkv[:, :, 2:5], angle.cos(), angle.sin())
    torch.testing.assert_close(got, rope_reference(qkv[:, :, 2:5], angle.cos(), angle.sin()))
    assert got.is_contiguous()


def test_more_features_than_a_head_has_are_refused(variant: str) -> None:
    with pytest.raises(ValueError, match="a head of 8 has no 16 features"):
        ops.rope(torch.randn(1, 1, 1, 8), torch.ones(1, 1, 8), torch.ones(1, 1, 8))
    with pytest.raises(ValueError, match="cos must be"):
        ops.rope(torch.randn(1, 2, 1, 8), torch.ones(1, 1, 4), torch.ones(1, 1, 4))
