"""An exception in any layer, in the middle of any operation, leaves the state as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import lmstate
from tests.invariants.mirror import Fault, Mirror, failing_method
from tests.zoo import ours, text

KINDS = [
    "llama",
    "mistral",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "minimax_m3",
    "qwen3_next",
    "mamba2",
    "mamba",
    "falcon_h1",
    "lfm2",
    "recurrent_gemma",
    "minimax",
]
SlotCommit = Callable[[lmstate.State], object]

OPERATIONS: dict[str, SlotCommit] = {
    "commit": lambda state: state.commit([3, 1]),
    "rewind": lambda state: state.rewind(0, state.lengths[0] - 3),
    "select": lambda state: state.select([1, None, 0]),
    "capture": lambda state: state.snapshot(0),
    "restore": lambda state: state.rewind(0, 0),
}


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_fault_in_any_layer_changes_nothing(case: str, operation: str) -> None:
    model = ours(case)
    mirror = Mirror(model, rows=2, rewind=8)
    mirror.extend([text(33)[0].tolist(), text(20, seed=1)[0].tolist()])
    state = mirror.state
    before = state.memory()
    raised = 0
    for layer in state.layers:
        if operation == "commit":
            model([[5, 6, 7, 8], [9, 10]], state, commit=False)
        try:
            with failing_method(layer, operation):
                OPERATIONS[operation](state)
        except Fault:
            raised += 1
            assert state.pending == ([4, 2] if operation == "commit" else [0, 0]), (
                "a commit that failed is still to come"
            )
        else:
            # This layer had no part in it: do it for good and stand where it leads.
            if operation == "commit":
                mirror.rows[0] += [5, 6, 7]
                mirror.rows[1] += [9]
            elif operation == "rewind":
                del mirror.rows[0][-3:]
            elif operation == "restore":
                mirror.rows[0].clear()
            before = state.memory()
        state.discard()
        if raised:
            assert state.memory() == before
        mirror.check()
        if not mirror.rows[0]:
            break
    assert raised or operation == "restore"
    if operation == "select":
        assert state.rows == 2


@pytest.mark.parametrize("case", KINDS)
def test_a_fault_while_the_backlog_is_computed_loses_nothing(case: str) -> None:
    from tests.invariants.mirror import failing_layer

    model = ours(case)
    mirror = Mirror(model, rows=2, rewind=2)
    mirror.extend([text(40)[0].tolist(), text(9, seed=1)[0].tolist()])
    mirror.rewind(0, 20)
    mirror.state.queue(1, [4, 5])
    mirror.rows[1] += [4, 5]
    for index in range(len(model.blocks)):
        with failing_layer(model, index, after=True), pytest.raises(Fault):
            model([[1], []], mirror.state)
        assert mirror.state.lengths == [20, 11]
    mirror.check()
