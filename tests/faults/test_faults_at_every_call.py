"""A fault at any torch or native call of an operation leaves the state as it was; the end of one makes no such call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import lmstate
from lmstate.ops import dispatch
from lmstate.state import changes
from tests.faults.harness import (
    KINDS,
    OPERATIONS,
    FailingCall,
    FailingNativeCall,
    Fault,
    Record,
    RefusingNativeCall,
    applies,
    prepared,
    standing,
)

CASES = [(kind, operation) for kind in KINDS for operation in OPERATIONS if applies(kind, operation)]
FORWARDS = ("decode", "prefill", "idle row", "backlog")
NATIVE = [(kind, each) for kind, each in CASES if each in (*FORWARDS, "commit all", "commit some", "drop")]

has_native = pytest.mark.skipif(dispatch.choice().library is None, reason="there are no native bodies")


def check(kind: str, operation: str, most: int, *failing: type[FailingCall | FailingNativeCall]) -> list[int]:
    """Have about `most` of the calls of an operation fail, each kind for itself; how many calls there are of each."""
    model, state = standing(kind, operation)
    done, counts = copy.deepcopy(state), []
    OPERATIONS[operation](model, done)
    before, after = Record(model, state), Record(model, done)
    for fails in failing:
        with fails() as counting:
            OPERATIONS[operation](model, copy.deepcopy(state))
        counts.append(counting.calls)
        for at in range(1, counting.calls + 1, max(1, counting.calls // most)):
            twin = copy.deepcopy(state)
            with fails(at):
                try:
                    OPERATIONS[operation](model, twin)
                    wanted = after  # a copy that is made again hides the fault
                except MemoryError:
                    wanted = before
            if operation == "backlog" and wanted is before:
                assert twin.lengths in (before.lengths, [before.lengths[0] + 2, before.lengths[1]])  # queued, or not
                twin.rewind(0, before.lengths[0])
                assert twin.lengths == before.lengths and twin.pending == before.pending
                continue
            assert Record(model, twin) == wanted, f"torn at call {at} of {counting.calls}"
            if wanted is before:  # and it can still be done
                OPERATIONS[operation](model, twin)
                assert Record(model, twin) == after
    return counts


@pytest.mark.parametrize("kind, operation", CASES)
def test_a_fault_at_any_call_changes_nothing(kind: str, operation: str) -> None:
    check(kind, operation, 2, FailingCall)


@pytest.mark.soak
@pytest.mark.parametrize("kind, operation", CASES)
def test_a_fault_at_every_single_call_changes_nothing(kind: str, operation: str) -> None:
    check(kind, operation, 10_000, FailingCall)


@has_native
@pytest.mark.parametrize("kind, operation", NATIVE)
def test_a_fault_at_any_native_call_changes_nothing(kind: str, operation: str) -> None:
    counts = check(kind, operation, 2, FailingNativeCall, RefusingNativeCall)
    assert all(counts) or operation not in FORWARDS


@has_native
@pytest.mark.soak
@pytest.mark.parametrize("kind, operation", CASES)
def test_a_fault_at_every_single_native_call_changes_nothing(kind: str, operation: str) -> None:
    check(kind, operation, 10_000, FailingNativeCall, RefusingNativeCall)


@has_native
@pytest.mark.parametrize("draft", [None, "text"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_native_call_of_generate_leaves_what_came_before_it(kind: str, draft: str | None) -> None:
    model, state = prepared(kind, rows=1)
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    held = state.lengths[0]

    def generate(state: lmstate.State) -> None:
        model.generate(prompt, state, max_new_tokens=6, draft=draft, return_ids=True)

    whole = copy.deepcopy(state)
    with FailingNativeCall() as counting:
        generate(whole)
    tokens = whole.tokens(0)
    for at in range(1, counting.calls + 1, max(1, counting.calls // 5)):
        twin, plain = copy.deepcopy(state), copy.deepcopy(state)
        with FailingNativeCall(at), pytest.raises(Fault):
            generate(twin)
        reached = twin.tokens(0)
        assert reached == tokens[: len(reached)] and len(reached) in (held, *range(held + len(prompt), len(tokens) + 1))
        for piece in (reached[held : held + len(prompt)], *([token] for token in reached[held + len(prompt) :])):
            model([piece], plain)
        assert Record(model, twin) == Record(model, plain), f"torn at call {at} of {counting.calls}"


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
    assert seen or operation in ("commit none", "snapshot", "discard", "copy", "tree")
