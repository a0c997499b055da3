"""Linear attention with a fixed decay a head (lightning), against transformers' MiniMax layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops.recurrent.linear_attention import linear_attention
from lmstate.ops.recurrent.ssd import chunked, recurrent
from tests.ops import fold_properties as properties

HEADS, D, DV = 3, 6, 5
SLOPE = torch.tensor([0.001, 0.3, 4.0])


def draw(rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(width)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    inputs = tuple(normal(rows, width, HEADS, size) for size in (D, D, DV))
    return inputs, (normal(rows, HEADS, D, DV),)


def lightning(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, carry: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return linear_attention(q, k, v, (-slope).expand(v.shape[:3]), carry, counts)


def fold(inputs: tuple[Tensor, ...], carry: tuple[Tensor, ...], counts: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    y, new = lightning(*inputs, SLOPE, carry[0], counts)
    return y, (new,)


@pytest.mark.parametrize("width", [1, 5, 64, 300])
def test_chunked_equals_recurrent(width: int) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        (q, k, v), (carry,) = draw(2, width, dtype)
        weight = torch.ones(2, width, HEADS, dtype=dtype)
        call = (v, weight, -SLOPE.to(dtype) * weight, k, q, None, carry.mT)
        for got, want in zip(chunked(*call), recurrent(*call), strict=True):
            assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("cuts", [(1,) * 40, (3, 4, 1), (64,), (65, 1)])
def test_any_cut_equals_whole(cuts: tuple[int, ...]) -> None:
    properties.check_any_cut_equals_whole(fold, *draw(2, 140), cuts, 2e-5)


@pytest.mark.parametrize("width", [1, 3, 4, 100])
def test_ragged_rows_equal_each_row_alone(width: int) -> None:
    inputs, carry = draw(4, width)
    properties.check_ragged_equals_alone(fold, inputs, carry, [0, 1, width, (width + 1) // 2], 2e-5)


@pytest.mark.parametrize("width", [2, 37])
def test_gradients(width: int) -> None:
    inputs, carry = draw(2, width, torch.float64)
    properties.check_gradients(fold, inputs, carry, [width, width // 2])


def test_equals_transformers_lightning_attention() -> None:
    peer = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = peer.MiniMaxConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=4, head_dim=4, num_hidden_layers=2, block_size=16,
        layer_types=["linear_attention", "linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    layer = peer.MiniMaxLightningAttention(config, layer_idx=1)
    x = torch.randn(2, 50, 16)
    with torch.no_grad():
        wanted, carry = layer(x, None, None)
        q, k, v = layer.act_fn(layer.qkv_proj(x)).view(2, 50, 4, 12).split(4, -1)
        zeros = torch.zeros(2, 4, 4, 4)
        y, new = lightning(q, k, v, layer.slope_rate.flatten(), zeros, torch.tensor([50, 50]))
        y = layer.out_proj(F.sigmoid(layer.output_gate(x)) * layer.norm(y.flatten(2)))
    torch.testing.assert_close((y, new), (wanted, carry), rtol=1e-5, atol=1e-5)
