"""Draws from filtered distributions: the native bodies against the reference in torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lmstate.ops as ops

FILTERS: list[dict[str, Any]] = [
    {},
    {"min_p": 0.05},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 2000},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.9999},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 500, "top_p": 0.95},
]


def cumulative(logits: torch.Tensor, temperature: float, **filters: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the reference, by id, and whose."""
    options = {"top_k": None, "top_p": None, "min_p": None} | filters
    probabilities, ids = ops.candidates(logits, temperature, **options)
    ids, order = ids.sort(-1)
    return probabilities.gather(-1, order).cumsum(-1), ids


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("width", [1, 7, 513, 5003])
@pytest.mark.parametrize(("temperature", "scale"), [(0.7, 4.0), (1.3, 0.1), (1e-3, 1.0)])
def test_a_number_draws_the_token_that_it_falls_on(
    variant: str, filters: dict[str, Any], width: int, temperature: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(64, width, generator=generator) * scale
    uniform = torch.rand(64, dtype=torch.float64, generator=generator)
    sums, ids = cumulative(logits, temperature, **filters)
    for given in (logits, logits.double()):  # the second one is the reference's
        picked = ops.sample(given, uniform, temperature, **filters)
        check(picked, uniform, sums, ids)


def check(picked: torch.Tensor, uniform: torch.Tensor, sums: torch.Tensor, ids: torch.Tensor) -> None:
    where = (ids == picked[:, None]).int().argmax(-1, keepdim=True)
    assert torch.equal(ids.gather(-1, where)[:, 0], picked)
    above = sums.gather(-1, where)[:, 0]
    below = torch.where(where[:, 0] > 0, sums.gather(-1, (where - 1).clamp(min=0))[:, 0], 0.0)
    assert bool((below < above).all()), "a token that may not come"
    assert bool((below - 2e-5 <= uniform).all() and (uniform <= above + 2e-5).all())


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_ends_of_the_distribution(variant: str, filters: dict[str, Any]) -> None:
    logits = torch.full((2, 3000), -math.inf)
    logits[:, [70, 2000, 2999]] = torch.tensor([1.0, 3.0, 2.5])
    picked = ops.sample(logits, torch.tensor([0.0, math.nextafter(1.0, 0.0)]).double(), 1.0, **filters)
    sums, ids = cumulative(logits[:1], 1.0, **filters)
    likely = ids[0, torch.diff(sums[0], prepend=torch.zeros(1)) > 1e-12]
    assert picked.tolist() == [int(likely[0]), int(likely[-1])]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_row_draws_the_same_alone(variant: str, filters: dict[str, Any]) -> None:
    logits, uniform = torch.randn(9, 9000), torch.rand(9, dtype=torch.float64)
    together = ops.sample(logits, uniform, 0.9, **filters)
    alone = [int(ops.sample(logits[row : row + 1], uniform[row : row + 1], 0.9, **filters)) for row in range(9)]
    assert together.tolist() == alone


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_equal_logits_are_drawn_alike(variant: str, filters: dict[str, Any]) -> None:
    width, draws = 130, 26_000
    held = width if "top_k" not in filters else min(width, filters["top_k"])
    held = max(1, math.ceil(held * filters.get("top_p", 1.0) - 1e-9))
    picked = ops.sample(torch.zeros(draws, width), torch.linspace(0, 1, draws + 1).double()[:-1], 1.0, **filters)
    counts = picked.bincount(minlength=width)
    assert int((counts > 0).sum()) == held
    assert int(counts[counts > 0].max() - counts[counts > 0].min()) <= 2


def test_what_is_no_number_is_told(variant: str) -> None:
    logits = torch.randn(5, 700)
    logits[1, 699], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    for filters in FILTERS:
        picked = ops.sample(logits, torch.full((5,), 0.5, dtype=torch.float64), 1.0, **filters)
        assert (picked >= 0).tolist() == [True, False, False, False, True]
    for temperature in (1e-300, 1e300):
        assert bool((ops.sample(logits[:1], torch.zeros(1).double(), temperature) >= 0).all())


def test_any_strides_no_rows_and_what_does_not_fit(variant: str) -> None:
    x, uniform = torch.randn(300, 3), torch.rand(3, dtype=torch.float64)
    assert torch.equal(ops.sample(x.T, uniform, 1.0), ops.sample(x.T.contiguous(), uniform, 1.0))
    assert ops.sample(torch.empty(0, 5), torch.empty(0, dtype=torch.float64), 1.0).tolist() == []
    with pytest.raises((ValueError, RuntimeError)):
        ops.sample(torch.randn(2, 5), uniform, 1.0)
