"""A fault at any torch call of an operation leaves the state as it was; the end of an operation makes no call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import lmstate
from lmstate.state import changes
from tests.faults.harness import KINDS, OPERATIONS, FailingCall, Fault, Record, applies, draft, prepared

FORWARDS = ("decode", "prefill", "idle row", "backlog")  # many calls, of which nothing is real before the commit
CASES = [(kind, operation) for kind in KINDS for operation in OPERATIONS if applies(kind, operation)]


def standing(kind: str, operation: str) -> tuple[lmstate.Model, lmstate.State]:
    model, state = prepared(kind)
    if operation.startswith("commit"):
        draft(model, state)
    return model, state


def check(kind: str, operation: str, most: int) -> None:
    model, state = standing(kind, operation)
    done = copy.deepcopy(state)
    with FailingCall() as counting:
        OPERATIONS[operation](model, done)
    before, after = Record(model, state), Record(model, done)
    step = max(1, counting.calls // most)
    for at in range(1, counting.calls + 1, step):
        twin = copy.deepcopy(state)
        with FailingCall(at):
            try:
                OPERATIONS[operation](model, twin)
                wanted = after  # a copy that is made again hides the fault
            except Fault:
                wanted = before
        if operation == "backlog" and wanted is before:
            assert twin.lengths in (before.lengths, [before.lengths[0] + 2, before.lengths[1]])  # queued, or not
            twin.rewind(0, before.lengths[0])
            assert twin.lengths == before.lengths and twin.pending == before.pending
            continue
        assert Record(model, twin) == wanted, f"torn at call {at} of {counting.calls}"
        if wanted is before:  # and it can still be done
            OPERATIONS[operation](model, twin)
            assert twin.lengths == done.lengths


@pytest.mark.parametrize("kind, operation", CASES)
def test_a_fault_at_any_call_changes_nothing(kind: str, operation: str) -> None:
    check(kind, operation, most=4)


@pytest.mark.soak
@pytest.mark.parametrize("kind, operation", CASES)
def test_a_fault_at_every_single_call_changes_nothing(kind: str, operation: str) -> None:
    check(kind, operation, most=10_000)


@pytest.mark.parametrize("kind, operation", CASES)
def test_what_is_computed_first_is_applied_without_a_call(
    kind: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, state = standing(kind, operation)
    whole, seen = changes._run, []

    def run(calls: list[changes.Call]) -> None:
        with FailingCall() as counting:
            whole(calls)
        seen.append(len(calls))
        functions = [call[0] for call in calls]
        copies = sum(call[0] is torch.Tensor.copy_ for call in calls)
        assert counting.calls == copies and (not copies or state.layout.static), "only static tensors are written"
        assert all(not hasattr(function, "__code__") for function in functions), "a line of Python can be interrupted"
        plain: list[Any] = [call for call in calls if call[0] is setattr]
        assert not any(isinstance(getattr(type(owner), name, None), property) for _, owner, name, _ in plain)

    monkeypatch.setattr(changes, "_run", run)
    OPERATIONS[operation](model, state)
    assert seen or operation == "commit none"
