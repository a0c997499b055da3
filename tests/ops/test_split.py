"""Parts of a matrix give the bits of the whole, in every storage."""

from __future__ import annotations

import pytest
import torch

from lmstate import ops
from lmstate.ops import Weight, quantize, to_bfloat12
from lmstate.ops.weights.bfloat12 import common_bytes, packed
from lmstate.ops.weights.split import selected

KINDS = ("float32", "12 bits", "int8", "int4")


def matrix(kind: str, n: int, k: int) -> Weight:
    """A matrix whose magnitudes differ from output to output, so that parts of it have other common ones."""
    numbers = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, n)[:, None]
    return quantize(numbers, "bfloat16" if kind == "12 bits" else kind)


def part(weight: Weight, outputs: torch.Tensor) -> Weight:
    """As a rank holds it."""
    own, table = selected(weight, outputs), common_bytes(weight)
    return own if table is None else packed(own, table)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 40, 400])
def test_parts_give_the_bits_of_the_whole(kind: str, tokens: int) -> None:
    whole = matrix(kind, 112, 576)
    x = torch.randn(tokens, 576, generator=torch.Generator().manual_seed(1))
    expected = ops.linear(x, to_bfloat12(whole))
    for outputs in (torch.arange(48), torch.arange(48, 112), torch.arange(5, 31), torch.arange(112).flip(0)[::3]):
        own = part(whole, outputs)
        assert own.kind == to_bfloat12(whole).kind
        assert torch.equal(ops.linear(x, own), expected[:, outputs])
        assert torch.equal(own.dequantize(), whole.dequantize()[outputs])
        assert torch.equal(own.rows(torch.arange(len(outputs))), whole.rows(outputs))


def test_the_table_of_the_whole_matters() -> None:
    """A part that is packed by itself has other rare numbers."""
    whole = matrix("12 bits", 112, 576)
    if common_bytes(whole) is None:
        pytest.skip("no native body reads 12 bits here")
    x = torch.randn(40, 576, generator=torch.Generator().manual_seed(1))
    expected = ops.linear(x, to_bfloat12(whole))[:, :48]
    assert not torch.equal(ops.linear(x, to_bfloat12(selected(whole, torch.arange(48)))), expected)
