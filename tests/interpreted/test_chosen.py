"""Choices of positions, and attention to chosen vectors: the references' numbers, and equal bits for any cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.attention import attend_beside, attend_blocks, choose
from lmstate.ops.cuda import chosen
from lmstate.ops.types.params import AttentionParams
from lmstate.ops.types.slab_table import SlabTable
from tests.interpreted.test_kernels import CLOSE, tables

LENGTHS, COUNTS = [150, 90, 40], [7, 3, 0]
STARTS = torch.tensor(LENGTHS) - torch.tensor(COUNTS)


def held(heads: int, width: int, dtype: torch.dtype = torch.float32, lengths: list[int] = LENGTHS) -> SlabTable:
    """Vectors in blocks in no order; NaN where none is stored."""
    (table,) = tables(lengths, [(heads, width)], dtype)
    counts = torch.tensor(lengths)
    table.write(torch.randn(len(lengths), max(lengths), heads, width), torch.zeros_like(counts), counts)
    return table


def ring(table: SlabTable) -> Tensor:
    return table.dense().nan_to_num(0.0)


def inputs(width: int, *shape: int) -> Tensor:
    """Numbers of queries, NaN at padding."""
    x = torch.randn(3, width, *shape)
    for row, count in enumerate(COUNTS):
        x[row, count:] = torch.nan
    return x


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("budget", [5, 1000])
def test_positions_are_those_of_the_largest_scores(rate: int, budget: int) -> None:
    q, weights, keys = inputs(7, 3, 20), inputs(7, 3), held(1, 20)
    # Of equal scores the last positions are chosen: some queries score nothing at all, below zero others.
    weights[0, 2], weights[0, 3] = 0.0, -weights[0, 3].abs()
    counts = torch.tensor(COUNTS)
    found = chosen.choose_positions(q, weights, keys, STARTS, counts, budget, rate)
    expected = choose.choose_positions_reference(
        q.nan_to_num(), weights.nan_to_num(), ring(keys), STARTS, counts, budget, rate
    )
    assert torch.equal(found, expected)
    for token in (0, 6):
        one = slice(token, token + 1), STARTS + token, torch.tensor([1, 0, 0])
        alone = chosen.choose_positions(q[:, one[0]], weights[:, one[0]], keys, one[1], one[2], budget, rate)
        assert torch.equal(alone[0, 0], found[0, token])


def some_places(most: int) -> Tensor:
    """Ascending places that each query sees, then -1."""
    places = torch.full((3, 7, most), -1)
    for row, count in enumerate(COUNTS):
        for token in range(count):
            seen = int(STARTS[row]) + token + 1
            size = min(most - 3 * (token % 2), seen)
            places[row, token, :size] = torch.randperm(seen)[:size].sort().values
    return places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
def test_chosen_latents(dtype: torch.dtype, sinks: bool) -> None:
    q, q_rope, latent, rope = inputs(7, 5, 48), inputs(7, 5, 8), held(1, 48, dtype), held(1, 8, dtype)
    places, sink = some_places(80), torch.randn(5) if sinks else None
    y = chosen.attend_chosen(q, q_rope, latent, rope, places, 0.2, sink)
    with dispatch.references():
        given = q.nan_to_num(), q_rope.nan_to_num(), ring(latent), ring(rope), places
        expected = choose.attend_chosen(*given, scale=0.2, sinks=sink)
    torch.testing.assert_close(y, expected, rtol=0, atol=3 * max(CLOSE[dtype], 2e-6))
    assert not y[1, 3:].any() and not y[2].any()
    wider = torch.nn.functional.pad(places, (0, 600), value=-1)  # as many as are stored where a text is longer
    assert torch.equal(chosen.attend_chosen(q, q_rope, latent, rope, wider, 0.2, sink), y)
    one = q[:1, 4:5], q_rope[:1, 4:5]
    assert torch.equal(chosen.attend_chosen(*one, latent, rope, places[:, 4:5][:1], 0.2, sink), y[:1, 4:5])


def test_a_window_and_entries_beside_it() -> None:
    q, keys, entries, sinks = inputs(7, 3, 32), held(1, 32), held(1, 32, lengths=[36, 22, 9]), torch.randn(3)
    counts = torch.tensor(COUNTS)
    given: dict[str, Any] = {"window": 70, "scale": 0.3, "sinks": sinks}
    places = (some_places(30) // 5).unique_consecutive(dim=-1)
    y = chosen.attend_beside(q, keys, entries, places, STARTS, counts, 70, 0.3, sinks)
    with dispatch.references():
        expected = attend_beside.attend_beside(
            q.nan_to_num(), ring(keys), ring(entries), places, STARTS, counts, **given
        )
    torch.testing.assert_close(y, expected, rtol=0, atol=5e-6)
    begin, short = torch.tensor([3, 0, 0]), torch.tensor([7, 2, 0])  # fewer positions than a window
    begun = chosen.attend_beside(q, keys, entries, places.clamp(max=0), begin, short, 70, 0.3, sinks)
    with dispatch.references():
        expected = attend_beside.attend_beside(
            q.nan_to_num(), ring(keys), ring(entries), places.clamp(max=0), begin, short, **given
        )
    for row, count in enumerate(short.tolist()):
        torch.testing.assert_close(begun[row, :count], expected[row, :count], rtol=0, atol=5e-6)
    for token in (0, 5):
        some = slice(token, token + 1)
        alone = chosen.attend_beside(
            q[:, some], keys, entries, places[:, some], STARTS + token, torch.tensor([1, 0, 0]), 70, 0.3, sinks
        )
        assert torch.equal(alone[0], y[0, some])


def test_chosen_blocks_of_positions() -> None:
    q, k, v, counts = inputs(7, 8, 16), held(2, 16), held(2, 24), torch.tensor(COUNTS)
    index, params = torch.randn(3, 7, 4, 12), AttentionParams(0.25)
    picked = attend_blocks.choose_blocks(index, ring(held(1, 12)), STARTS, counts, budget=3, size=16, local=1)
    y = chosen.attend_blocks(q, k, v, picked, STARTS, counts, params, 16)
    with dispatch.references():
        expected = attend_blocks.attend_blocks(
            q.nan_to_num(), ring(k), ring(v), picked, STARTS, counts, params, size=16
        )
    torch.testing.assert_close(y, expected, rtol=0, atol=5e-6)
    assert not y[1, 3:].any() and not y[2].any()
    for token in (0, 6):
        some = slice(token, token + 1)
        alone = chosen.attend_blocks(
            q[:, some], k, v, picked[:, some], STARTS + token, torch.tensor([1, 0, 0]), params, 16
        )
        assert torch.equal(alone[0], y[0, some])
