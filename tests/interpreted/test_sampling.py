"""Draws of tokens: the ones of the processor, whatever else is drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lmstate.ops as ops
from lmstate.ops.cuda import sampling
from tests.ops.test_sample import FILTERS, check, cumulative


def drawn(logits: torch.Tensor, uniform: torch.Tensor, temperature: float, **filters: Any) -> torch.Tensor:
    return sampling.sample(logits, uniform, temperature, **{"top_k": None, "top_p": None, "min_p": None} | filters)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("width", "temperature", "scale"), [(7, 1.3, 0.1), (2500, 0.7, 4.0), (2500, 1e-3, 1.0)])
def test_tokens_are_those_of_the_processor(
    filters: dict[str, Any], width: int, temperature: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "HEAD", 100)
    logits = torch.randn(12, width) * scale
    uniform = torch.rand(12, dtype=torch.float64)
    picked = drawn(logits, uniform, temperature, **filters)
    assert torch.equal(picked, ops.sample(logits, uniform, temperature, **filters))
    check(picked, uniform, *cumulative(logits, temperature, **filters))
    alone = [int(drawn(logits[row : row + 1], uniform[row : row + 1], temperature, **filters)) for row in (0, 7)]
    assert alone == [int(picked[0]), int(picked[7])]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_equal_and_infinite_logits_and_those_that_are_not_numbers(filters: dict[str, Any]) -> None:
    logits = torch.full((6, 1500), -math.inf)
    logits[:2, [70, 1100, 1499]] = torch.tensor([1.0, 3.0, 2.5])
    logits[2] = 0
    logits[3, 9], logits[4, 3] = math.nan, math.inf
    uniform = torch.tensor([0.0, math.nextafter(1.0, 0.0), 0.6, 0.5, 0.5, 0.5]).double()
    picked = drawn(logits, uniform, 1.0, **filters)
    assert torch.equal(picked, ops.sample(logits, uniform, 1.0, **filters))
    assert picked[3:].tolist() == [-1, -1, -1]
    for temperature in (1e-300, 1e300):
        assert int(drawn(logits[:1], uniform[:1], temperature, **filters)) >= 0


def test_no_rows() -> None:
    assert drawn(torch.empty(0, 5), torch.empty(0, dtype=torch.float64), 1.0).tolist() == []
