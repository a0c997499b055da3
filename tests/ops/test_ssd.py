"""ssd: the Mamba-2 recurrence, two bodies of it, against transformers' own functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops.recurrent.ssd import RECURRENT_UP_TO, chunked, recurrent, ssd
from tests.ops import fold_properties as properties

HEADS, P, N = 4, 6, 8
LIMITS = (0.02, 4.0)


def draw(rows, width, groups=2, dtype=torch.float32, decay=1.0):
    """x, dt, B, C; the parameters A, D, dt_bias; a carry. `decay` scales A."""
    generator = torch.Generator().manual_seed(width + groups)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    inputs = (
        normal(rows, width, HEADS, P),
        normal(rows, width, HEADS),
        normal(rows, width, groups, N),
        normal(rows, width, groups, N),
    )
    return inputs, (-decay * normal(HEADS).exp(), normal(HEADS), normal(HEADS)), (normal(rows, HEADS, P, N),)


def fold_with(parameters: tuple[Tensor, ...]) -> properties.Fold:
    A, D, dt_bias = parameters

    def fold(inputs, carry, counts):
        x, dt, B, C = inputs
        y, new = ssd(x, dt, A, B, C, D, carry[0], counts, dt_bias=dt_bias, dt_limits=LIMITS)
        return y, (new,)

    return fold


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("width", [1, 5, 64, 300])
def test_chunked_equals_recurrent(skip: bool, groups: int, decay: float, width: int) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        (x, dt, B, C), (A, D, _), (carry,) = draw(2, width, groups, dtype, decay)
        weight = F.softplus(dt)
        scan = (x, weight, weight * A, B, C, D if skip else None, carry)
        wanted = recurrent(*scan)
        # Sums of a few hundred terms: the error of one element is judged by the size of the largest.
        for got, want in zip(chunked(*scan), wanted, strict=True):
            assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("cuts", [(1,) * 40, (3, 4, 1), (64,), (65, 1)])
def test_any_cut_equals_whole(cuts: tuple[int, ...]) -> None:
    inputs, parameters, carry = draw(2, 140)
    properties.check_any_cut_equals_whole(fold_with(parameters), inputs, carry, cuts, 2e-5)


@pytest.mark.parametrize("width", [1, RECURRENT_UP_TO, RECURRENT_UP_TO + 1, 100])
def test_ragged_rows_equal_each_row_alone(width: int) -> None:
    inputs, parameters, carry = draw(4, width)
    counts = [0, 1, width, (width + 1) // 2]
    properties.check_ragged_equals_alone(fold_with(parameters), inputs, carry, counts, 2e-5)


@pytest.mark.parametrize("width", [2, 37])
def test_gradients(width: int) -> None:
    inputs, parameters, carry = draw(2, width, dtype=torch.float64)
    properties.check_gradients(fold_with(parameters), inputs, carry, [width, width // 2])


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)])
@pytest.mark.parametrize("module", ["mamba2", "bamba", "granitemoehybrid", "nemotron_h"])
def test_equals_transformers_chunk_scan(module: str, limits: tuple[float, float]) -> None:
    peer = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    for width in (1, 3, 100):
        (x, dt, B, C), (A, D, dt_bias), (carry,) = draw(2, width)
        got = ssd(x, dt, A, B, C, D, carry, torch.tensor([width] * 2), dt_bias=dt_bias, dt_limits=limits)
        wanted = peer.mamba2_chunk_scan(
            x, dt, A, B, C, 32, D=D, dt_bias=dt_bias, initial_states=carry,
            dt_softplus=True, dt_limit=limits, return_final_states=True,
        )  # fmt: skip
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_equals_transformers_single_token_update() -> None:
    peer = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    (x, dt, B, C), (A, D, dt_bias), (carry,) = draw(2, 1)
    got, new = ssd(x, dt, A, B, C, D, carry, torch.tensor([1, 1]), dt_bias=dt_bias)
    state = carry.clone()
    wanted = peer.mamba2_selective_state_update(
        state, x[:, 0], dt[:, 0, :, None].expand(-1, -1, P), A[:, None, None].expand(-1, P, N), B[:, 0], C[:, 0],
        D[:, None].expand(-1, P), dt_bias=dt_bias[:, None].expand(-1, P), dt_softplus=True,
    )  # fmt: skip
    torch.testing.assert_close((got[:, 0], new), (wanted, state), rtol=1e-5, atol=1e-5)


def test_ten_thousand_tokens_of_decode_do_not_drift_from_the_chunked_form() -> None:
    (x, dt, B, C), (A, D, _), (carry,) = draw(1, 10_000)
    weight = F.softplus(dt - 3)
    scan = (x, weight, weight * A * 0.1, B, C, D, carry)
    exact_y, exact = chunked(*(each.double() for each in scan))
    with torch.inference_mode():
        step_y, step = recurrent(*scan)
        whole_y, whole = chunked(*scan)
    size = exact.abs().max()
    errors = {
        "recurrent carry": (step - exact).abs().max() / size,
        "chunked carry": (whole - exact).abs().max() / size,
        "between them": (step - whole).abs().max() / size,
        "between their outputs": (step_y - whole_y).abs().max() / exact_y.abs().max(),
    }
    print("\nssd, 10,000 tokens:", ", ".join(f"{name} {float(e):.1e}" for name, e in errors.items()))
    assert max(errors.values()) < 1e-5
