"""mlstm: a matrix memory kept without its stabilizer, against transformers' token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmstate.ops.recurrent.mlstm import mlstm
from tests.ops import fold_properties as properties

HEADS, D, DV, EPS = 3, 6, 5, 1e-3


def draw(
    rows: int, width: int, dtype: torch.dtype = torch.float32, strength: float = 3.0
) -> tuple[properties.Inputs, properties.Carry]:
    """q, k, v and both gates, which are `strength` large; and what comes before."""
    generator = torch.Generator().manual_seed(width)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    gates = tuple(strength * normal(rows, width, HEADS) for _ in range(2))
    inputs = (*(normal(rows, width, HEADS, size) for size in (D, D, DV)), *gates)
    return inputs, (normal(rows, HEADS, D, DV + 1), normal(rows, HEADS))


def fold(inputs: properties.Inputs, carry: properties.Carry, counts: Tensor) -> tuple[Tensor, properties.Carry]:
    q, k, v, i, f = inputs
    return mlstm(q, k, v, i, f, (carry[0], carry[1]), counts, eps=EPS)


@pytest.mark.parametrize("strength", [0.3, 3.0, 15.0])
@pytest.mark.parametrize("width", [1, 5, 150])
def test_equals_transformers_token_by_token(width: int, strength: float) -> None:
    peer = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
    if peer.external_xlstm:
        pytest.skip("the xlstm package takes the place of transformers' own functions")
    inputs, _ = draw(2, width, torch.float64, strength)
    q, k, v, i, f = (x.transpose(1, 2) for x in inputs)
    kinds = {"dtype_state": torch.float64, "eps": EPS, "return_last_states": True}
    wanted, (C, n, m) = peer.mlstm_recurrent_sequence_native(q, k, v, i, f, **kinds)
    carry = (torch.zeros(2, HEADS, D, DV + 1, dtype=torch.float64), torch.zeros(2, HEADS, dtype=torch.float64))
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-4)):
        y, (state, peak) = fold(
            tuple(x.to(dtype) for x in inputs), tuple(x.to(dtype) for x in carry), torch.tensor([width, width])
        )
        torch.testing.assert_close(y.double(), wanted.transpose(1, 2), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(peak.double(), m[..., 0], rtol=1e-5, atol=1e-5)
        kept = torch.cat([C, n[..., None]], -1)
        small = state.double() * (-m)[..., None].exp()
        torch.testing.assert_close(small, kept, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cuts", [(1,) * 40, (3, 4, 1), (64,), (65, 1)])
def test_any_cut_equals_whole(cuts: tuple[int, ...]) -> None:
    properties.check_any_cut_equals_whole(fold, *draw(2, 140, strength=1.0), cuts, 5e-5)


@pytest.mark.parametrize("width", [1, 3, 4, 100])
def test_ragged_rows_equal_each_row_alone(width: int) -> None:
    inputs, carry = draw(4, width)
    properties.check_ragged_equals_alone(fold, inputs, carry, [0, 1, width, (width + 1) // 2], 2e-5)


@pytest.mark.parametrize("width", [2, 37])
def test_gradients(width: int) -> None:
    inputs, carry = draw(2, width, torch.float64, strength=1.0)
    properties.check_gradients(fold, inputs, carry, [width, width // 2])
