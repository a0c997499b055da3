"""The delta rule of RWKV-7, against the transition matrix of its paper, in any cut and beside other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops.recurrent.vector_delta_rule import vector_delta_rule
from tests.ops import fold_properties as properties

H, D, DV = 3, 6, 5


def draw(rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[properties.Inputs, properties.Carry]:
    generator = torch.Generator().manual_seed(width)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    r, k, kk = (normal(rows, width, H, D) for _ in range(3))
    v, g, a = normal(rows, width, H, DV), -normal(rows, width, H, D).exp(), normal(rows, width, H, D).sigmoid()
    return (r, g, k, v, F.normalize(kk, dim=-1), a), (normal(rows, H, D, DV),)


def fold(inputs: properties.Inputs, carry: properties.Carry, counts: Tensor) -> tuple[Tensor, properties.Carry]:
    r, g, k, v, kk, a = inputs
    y, state = vector_delta_rule(r, g, k, v, kk, a, carry[0], counts)
    return y, (state,)


def test_equals_the_transition_matrix() -> None:
    (r, g, k, v, kk, a), (state,) = draw(1, 50)
    y, (last,) = fold((r, g, k, v, kk, a), (state,), torch.tensor([50]))
    for head in range(H):
        S = state[0, head].double()
        for t in range(50):
            R, G, K, V, KK, A = (x[0, t, head].double() for x in (r, g, k, v, kk, a))
            S = (torch.diag(G.exp()) - torch.outer(A * KK, KK)) @ S + torch.outer(K, V)
            torch.testing.assert_close(y[0, t, head].double(), R @ S, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(last[0, head].double(), S, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", [(1,) * 40, (3, 4, 1), (64,), (65, 1)])
def test_any_cut_gives_the_same_bits(cuts: tuple[int, ...]) -> None:
    properties.check_any_cut_equals_whole(fold, *draw(2, 90), cuts, 0.0)


@pytest.mark.parametrize("width", [1, 3, 40])
def test_ragged_rows_have_the_bits_of_each_row_alone(width: int) -> None:
    inputs, carry = draw(4, width)
    properties.check_ragged_equals_alone(fold, inputs, carry, [0, 1, width, (width + 1) // 2], 0.0)


@pytest.mark.parametrize("width", [2, 9])
def test_gradients(width: int) -> None:
    inputs, carry = draw(2, width, torch.float64)
    properties.check_gradients(fold, inputs, carry, [width, width // 2])
