"""Logits equal to those of `transformers` on the same weights, whole and cut, for every family."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.zoo import CASES, pair, text

BOUND = 1e-4


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    theirs, ours = pair(case)
    ids = text(150, rows=2)
    with torch.no_grad():
        expected = theirs(ids).logits
    assert expected.std() > 0.1, "logits too even to tell a right model from a wrong one"
    torch.testing.assert_close(ours(ids), expected, atol=BOUND, rtol=BOUND)

    state = ours.new_state(2)
    cuts = [0, 40, 41, 42, 100, 150]
    pieces = [ours(ids[:, a:b], state, logits="all") for a, b in itertools.pairwise(cuts)]
    assert state.lengths == [150, 150]
    # Ropes that stretch with the text turn every key anew as it grows: only the last piece is of the whole text.
    stretches = any(case.endswith(kind) for kind in ("dynamic", "longrope"))
    from_ = 100 if stretches else 0
    torch.testing.assert_close(torch.cat(pieces, 1)[:, from_:], expected[:, from_:], atol=BOUND, rtol=BOUND)
