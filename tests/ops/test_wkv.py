"""wkv: weighted averages of unbounded weights, against transformers' loop over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmstate.ops.recurrent.wkv import wkv
from tests.ops import fold_properties as properties

F = 11
DECAY, BONUS = -torch.logspace(-4, 1.5, F), torch.linspace(-3.0, 3.0, F)


def draw(
    rows: int, width: int, dtype: torch.dtype = torch.float32, strength: float = 3.0
) -> tuple[properties.Inputs, properties.Carry]:
    generator = torch.Generator().manual_seed(width)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    k, v = strength * normal(rows, width, F), normal(rows, width, F)
    return (k, v), (normal(rows, F), 1.0 + normal(rows, F).abs(), strength * normal(rows, F))


def fold(inputs: properties.Inputs, carry: properties.Carry, counts: Tensor) -> tuple[Tensor, properties.Carry]:
    num, den, peak = carry
    return wkv(*inputs, DECAY, BONUS, (num, den, peak), counts)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("strength", [0.3, 3.0])
@pytest.mark.parametrize("width", [1, 5, 150])
def test_equals_transformers_token_by_token(width: int, strength: float, fresh: bool) -> None:
    peer = pytest.importorskip("transformers.models.rwkv.modeling_rwkv")
    inputs, carry = draw(2, width, strength=strength)
    carry = tuple(map(torch.zeros_like, carry)) if fresh else carry
    before = None if fresh else [part.clone() for part in carry]
    wanted, kept = peer.rwkv_linear_attention_cpu((-DECAY).log(), BONUS, *inputs, state=before, return_state=True)
    y, new = fold(inputs, carry, torch.tensor([width, width]))
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    for got, want in zip(new, kept, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strength", [1.0, 60.0, 1e4])  # of the larger ones, exp overflows
@pytest.mark.parametrize("width", [3, 1500])
def test_equals_the_formulas_in_double_precision(width: int, strength: float) -> None:
    """Those with the largest weight taken out: transformers' loop is float32, and what it takes out drifts."""
    (k, v), (num, den, peak) = draw(1, width, strength=strength)
    y, _ = fold((k, v), (num, den, peak), torch.tensor([width]))
    k, v, num, den, peak = (x.double()[0] for x in (k, v, num, den, peak))
    wanted = []
    for t in range(width):
        top = torch.maximum(peak, k[t] + BONUS)
        past, now = (peak - top).exp(), (k[t] + BONUS - top).exp()
        wanted.append((past * num + now * v[t]) / (past * den + now))
        top = torch.maximum(peak + DECAY, k[t])
        past, now = (peak + DECAY - top).exp(), (k[t] - top).exp()
        num, den, peak = past * num + now * v[t], past * den + now, top
    torch.testing.assert_close(y[0].double(), torch.stack(wanted), rtol=1e-4, atol=1e-5)


def test_what_comes_first_is_remembered_whole_however_small_its_weight() -> None:
    k, v = torch.full((1, 3, F), -500.0), torch.arange(3.0)[None, :, None].expand(1, 3, F)
    zeros = tuple(torch.zeros(1, F) for _ in range(3))
    y, _ = fold((k, v), zeros, torch.tensor([3]))
    assert y.isfinite().all() and torch.equal(y[:, 0], v[:, 0]) and (y[:, 1:] > 0).all()


@pytest.mark.parametrize("cuts", [(1,) * 40, (3, 4, 1), (64,), (65, 1)])
def test_any_cut_equals_whole(cuts: tuple[int, ...]) -> None:
    properties.check_any_cut_equals_whole(fold, *draw(2, 140), cuts, 2e-5)


@pytest.mark.parametrize("width", [1, 3, 4, 16, 100])
def test_ragged_rows_equal_each_row_alone(width: int) -> None:
    inputs, carry = draw(4, width)
    tolerance = 0.0 if width <= 16 else 2e-5  # bit for bit where they go token by token
    properties.check_ragged_equals_alone(fold, inputs, carry, [0, 1, width, (width + 1) // 2], tolerance)


@pytest.mark.parametrize("width", [2, 37])
def test_gradients(width: int) -> None:
    inputs, carry = draw(2, width, torch.float64, strength=1.0)
    properties.check_gradients(fold, inputs, carry, [width, width // 2])
