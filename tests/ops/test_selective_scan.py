"""selective_scan: the Mamba-1 recurrence, two bodies of it, against transformers' own functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmstate.ops.recurrent.selective_scan import PIECE, RECURRENT_UP_TO, chunked, recurrent, selective_scan
from tests.ops import fold_properties as properties

FEATURES, N = 5, 4


def draw(rows, width, dtype=torch.float32, decay=1.0):
    """x, dt, B, C; the parameters A, D; a carry. `decay` scales A."""
    generator = torch.Generator().manual_seed(width)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    x, dt = normal(rows, width, FEATURES), normal(rows, width, FEATURES).exp()
    inputs = (x, dt, normal(rows, width, N), normal(rows, width, N))
    return inputs, (-decay * normal(FEATURES, N).exp(), normal(FEATURES)), (normal(rows, FEATURES, N),)


def fold_with(parameters: tuple[Tensor, ...]) -> properties.Fold:
    A, D = parameters

    def fold(inputs, carry, counts):
        x, dt, B, C = inputs
        y, new = selective_scan(x, dt, A, B, C, D, carry[0], counts)
        return y, (new,)

    return fold


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("decay", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("width", [1, 2, 3, 17, PIECE, PIECE + 1, 5 * PIECE - 3])
def test_chunked_equals_recurrent(skip: bool, decay: float, width: int) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        (x, dt, B, C), (A, D), (carry,) = draw(2, width, dtype, decay)
        call = (x, dt, A, B, C, D if skip else None, carry)
        for got, want in zip(chunked(*call), recurrent(*call), strict=True):
            assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("cuts", [(1,) * 40, (3, 4, 1), (64,), (65, 1)])
def test_any_cut_equals_whole(cuts: tuple[int, ...]) -> None:
    inputs, parameters, carry = draw(2, 140)
    properties.check_any_cut_equals_whole(fold_with(parameters), inputs, carry, cuts, 1e-5)


@pytest.mark.parametrize("width", [1, RECURRENT_UP_TO, RECURRENT_UP_TO + 1, 100])
def test_ragged_rows_equal_each_row_alone(width: int) -> None:
    inputs, parameters, carry = draw(4, width)
    counts = [0, 1, width, (width + 1) // 2]
    properties.check_ragged_equals_alone(fold_with(parameters), inputs, carry, counts, 1e-5)


@pytest.mark.parametrize("width", [2, 70])
def test_gradients(width: int) -> None:
    inputs, parameters, carry = draw(2, width, torch.float64)
    properties.check_gradients(fold_with(parameters), inputs, carry, [width, width // 2])


@pytest.mark.parametrize("width", [1, 5, 100])
def test_equals_transformers_selective_scan(width: int) -> None:
    peer = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    (x, dt, B, C), (A, D), _ = draw(2, width)
    carry = torch.zeros(2, FEATURES, N)  # the peer's scan has no initial state
    y, new = selective_scan(x, dt, A, B, C, D, carry, torch.tensor([width] * 2))
    wanted, state = peer.mamba_selective_scan(x.mT, dt.mT, A, B.mT, C.mT, D, return_last_state=True)
    torch.testing.assert_close((y, new), (wanted.mT, state), rtol=1e-5, atol=1e-5)


def test_equals_transformers_single_token_update() -> None:
    peer = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    (x, dt, B, C), (A, D), (carry,) = draw(2, 1)
    y, new = selective_scan(x, dt, A, B, C, D, carry, torch.tensor([1, 1]))
    state = carry.clone()
    wanted = peer.mamba_selective_state_update(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D)
    torch.testing.assert_close((y[:, 0], new), (wanted, state), rtol=1e-5, atol=1e-5)
