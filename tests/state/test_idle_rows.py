"""Rows whose layers go back in one call, each from what the one before it left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lmstate.errors import PendingError
from lmstate.state import State
from tests.invariants.mirror import Mirror
from tests.zoo import ours, text


@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3", "mamba2", "qwen3_next-dense", "lfm2", "rwkv"])
def test_several_idle_rows_read_their_last_token_again(case: str) -> None:
    mirror = Mirror(ours(case), rows=3, rewind=16)
    mirror.extend([text(5, seed=1)[0].tolist(), [], text(2, seed=2)[0].tolist()], "none")
    got = mirror.model([[], text(3, seed=3)[0].tolist(), []], mirror.state, commit=False)
    assert got is not None
    for row in (0, 2):
        torch.testing.assert_close(got[row], mirror.expected(mirror.rows[row])[-1], atol=1e-4, rtol=1e-4)
    mirror.state.discard()
    mirror.check()


MOVES: dict[str, Callable[[State], object]] = {
    "queue": lambda state: state.queue(0, [5, 6]),
    "rewind": lambda state: state.rewind(0, 2),
    "expect": lambda state: state.expect(0, 9),
    "mark": lambda state: state.mark(0),
    "snapshot": lambda state: state.snapshot(0),
    "restore": lambda state: state.restore(0, state.snapshot(2)),
    "remove": lambda state: state.remove(0),
    "add": lambda state: state.add(state.snapshot(0)),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3", "mamba2", "qwen3_next-dense", "lfm2", "rwkv"])
def test_a_step_of_no_tokens_may_have_its_verdict_after_a_row_has_moved(case: str, move: str) -> None:
    """As one of other rows' tokens may; so a loop needs not ask whether any row had some."""
    model = ours(case)
    state, straight = model.new_state(3, rewind=16), model.new_state(3, rewind=16)
    for each in (state, straight):
        model([[3, 4, 5], [6], [7, 8]], each)
    model([[], [], []], state, commit=False)
    for each in (state, straight):
        MOVES[move](each)
    assert state.pending == [0] * state.rows
    state.commit([0] * state.rows)
    with pytest.raises(PendingError, match="nothing is pending"):
        state.commit()
    assert state.lengths == straight.lengths and state.removed == straight.removed
    step: list[list[int]] = [[] if row in state.removed else [9] for row in range(state.rows)]
    kept = [row for row in range(state.rows) if row not in state.removed]
    assert torch.equal(model(step, state)[kept], model(step, straight)[kept])  # type: ignore[index]
