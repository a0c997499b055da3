"""A model that learned each of its positions ends where they end, and none of its tokens moves to another."""

from __future__ import annotations

import pytest
import torch

from lmstate.errors import CapacityError, UnsupportedError
from tests.invariants.mirror import Mirror
from tests.zoo import ours, text

PLACES = 512


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


def test_a_row_may_have_every_position_and_no_other() -> None:
    model = ours("gpt2")
    mirror = Mirror(model, rows=2)
    mirror.extend([ids(PLACES - 3), ids(20, 1)])
    with pytest.raises(CapacityError, match=f"learned {PLACES} positions"):
        model([ids(4, 2), [5]], mirror.state)
    with pytest.raises(CapacityError, match=f"learned {PLACES} positions"):
        mirror.state.queue(0, ids(4, 2))
    mirror.extend([ids(3, 2), ids(60, 3)])  # padded past the last position
    mirror.rewind(0, PLACES - 2)
    mirror.check()
    with pytest.raises(CapacityError, match=f"learned {PLACES} positions"):
        model([ids(PLACES + 1)])


def test_no_span_of_it_can_be_dropped() -> None:
    mirror = Mirror(ours("gpt2"))
    mirror.extend([ids(20)])
    with pytest.raises(UnsupportedError, match="learned each position"):
        mirror.state.drop(0, 3, 5)
    mirror.check()


def test_a_static_state_is_no_longer_than_its_positions() -> None:
    model = ours("gpt2")
    with pytest.raises(UnsupportedError, match=f"capacity={PLACES} or less"):
        model.new_state(capacity=PLACES + 1, static=True)
    state = model.new_state(2, capacity=PLACES, static=True)
    tokens = torch.tensor([ids(9), ids(9, 1)])
    got = model.decode_step(tokens, state, logits="all")
    state.commit()
    torch.testing.assert_close(got, model(tokens), atol=1e-4, rtol=1e-4)
