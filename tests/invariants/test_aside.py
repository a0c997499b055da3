"""What is done to an idle row while other rows have pending tokens holds, whatever becomes of those."""

from __future__ import annotations

from functools import cache

import pytest

import lmstate
from tests.invariants.mirror import Mirror
from tests.zoo import ours, text

CASES = [
    "llama",
    "mistral",
    "gemma3",
    "gemma4",
    "deepseek_v3",
    "qwen3_next-dense",
    "mamba2",
    "falcon_h1",
    "lfm2",
    "minimax",
]


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


@cache
def snapshot(case: str) -> lmstate.Snapshot:
    """Of a row of 100 tokens."""
    mirror = Mirror(ours(case))
    mirror.extend([ids(100)])
    return mirror.state.snapshot()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("held", [0, 1, 70])
@pytest.mark.parametrize("drafted", [1, 80])
@pytest.mark.parametrize("accepted", [0, 1, 80])
def test_a_row_that_was_restored_aside_is_whole(case: str, held: int, drafted: int, accepted: int) -> None:
    """Also where the slots that a discard brings back are fewer than what was restored."""
    model, stored = ours(case), snapshot(case)
    mirror = Mirror(model, rows=2, deferred=True)
    mirror.extend([ids(held, seed=1), ids(held, seed=2)])
    draft = ids(drafted, seed=3)
    mirror.model([[], draft], mirror.state, commit=False)
    mirror.restore(0, stored, ids(100))
    mirror.state.commit([0, min(accepted, drafted)])
    mirror.rows[1] += draft[:accepted]
    mirror.check()
    mirror.rewind(0, 90)
    mirror.extend([[5], [6]])
    mirror.check()
