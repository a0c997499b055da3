"""Ten thousand tokens, drafted and partly accepted: no farther from the whole text than any other way to cut it."""

from __future__ import annotations

import random

import pytest
import torch

from tests.sweeps import sampled
from tests.zoo import ours, text

LENGTH = 10_000
DRAFT = 8


DRIFTING = ("qwen3_next", "mamba2", "mistral", "bailing_hybrid", "xlstm", "rwkv")


@pytest.mark.parametrize("case", sampled(DRIFTING, ("qwen3_next", "mamba2", "mistral")))
def test_drafting_drifts_no_farther_than_another_chunking(case: str, record_property: pytest.RecordProperty) -> None:
    model, ids = ours(case), text(LENGTH)[0].tolist()
    whole, chunks, drafted = (model.new_state() for _ in range(3))
    expected = model([ids], whole)
    for start in range(0, LENGTH, DRAFT):
        straight = model([ids[start : start + DRAFT]], chunks)
    chance = random.Random(0)
    held = []
    while (done := drafted.lengths[0]) < LENGTH:
        right = ids[done : done + DRAFT]
        accepted = min(chance.randint(0, DRAFT), len(right))
        draft = [*right[:accepted], *(token % 98 + 1 for token in right[accepted:])]
        model([draft], drafted, logits="all", commit=False)
        drafted.commit([accepted])
        held.append(sum(drafted.memory().values()))
    assert drafted.tokens(0) == ids
    got = model([[]], drafted)
    assert got is not None and straight is not None and expected is not None
    drift, usual = (float((logits - expected).abs().max()) for logits in (got, straight))
    record_property("drift", drift)
    print(f"\n{case}: drafted {drift:.1e}, in chunks of {DRAFT} {usual:.1e}, logits of deviation {expected.std():.2f}")
    assert drift <= max(2 * usual, 1e-4)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    if case in ("mamba2", "xlstm", "rwkv"):
        assert max(held[200:]) <= max(held[:200]), "a recurrence holds as much after ten thousand tokens as after some"
