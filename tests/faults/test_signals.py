"""Real interrupts at any moment of any operation: it has happened or it has not."""

from __future__ import annotations

import copy
import random
import signal
import sys
import threading
import time

import pytest
import torch

import lmstate
from tests.faults.harness import KINDS, OPERATIONS, Record, applies, draft, prepared

SIGNALED = ("decode", "commit all", "commit some", "commit none", "rewind", "rewind far", "select", "restore", "drop")
THOROUGH = 10  # every so many interrupts the whole record is compared
CASES = [(kind, operation) for kind in KINDS for operation in SIGNALED if applies(kind, operation)]

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or threading.current_thread() is not threading.main_thread(), reason="signals are POSIX's"
)


def interrupted(kind: str, operation: str, times: int) -> int:
    """Interrupt one after another until `times` interrupts came in time, 20 tries for each; how many did."""
    model, state = prepared(kind)
    if operation.startswith("commit"):
        draft(model, state)
    act = OPERATIONS[operation]
    done, lasts = copy.deepcopy(state), float("inf")
    for twin in (done, copy.deepcopy(state), copy.deepcopy(state)):
        begin = time.perf_counter()
        act(model, twin)
        lasts = min(lasts, time.perf_counter() - begin)
    before, after = Record(model, state), Record(model, done)
    quick_before, quick_after = (Glance(model, copy.deepcopy(each)) for each in (state, done))
    generator, hit, twin = random.Random(0), 0, copy.deepcopy(state)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(20 * times):
            if hit == times:
                break
            try:
                begin = time.perf_counter()
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, generator.uniform(0, 1.1 * lasts)))
                act(model, twin)
                signal.setitimer(signal.ITIMER_REAL, 0)
                lasts = min(lasts, time.perf_counter() - begin)  # others may have had the processor before
                time.sleep(0)  # one that came just now is raised here
                twin = copy.deepcopy(state)
                continue
            except KeyboardInterrupt:
                hit += 1
            # An interrupt may come between a forward and its end: what is pending then is of no forward, and goes.
            if hit % THOROUGH == 1:
                full = Record(model, twin)
                assert full in (before, after), f"torn: {full.lengths} of {before.lengths} and {after.lengths}"
            got = Glance(model, twin)
            assert got in (quick_before, quick_after), f"torn: {got.lengths} of {before.lengths} and {after.lengths}"
            if got != quick_before:
                twin = copy.deepcopy(state)  # else it is interrupted again as it is
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return hit


class Glance:
    """What a `Record` has, but for going back: read without a copy where nothing is pending."""

    def __init__(self, model: lmstate.Model, state: lmstate.State):
        self.lengths, self.pending = state.lengths, state.pending
        self.tokens = [state.tokens(row) for row in range(state.rows)]
        own = state
        if any(self.pending):
            own = copy.deepcopy(state)
            own.commit([min(1, n) for n in self.pending])
        self.logits = model([[11, 12]] * own.rows, own, logits="all", commit=False)
        own.discard()

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Glance) and self.logits is not None and other.logits is not None
        same = (self.lengths, self.pending, self.tokens) == (other.lengths, other.pending, other.tokens)
        return same and torch.equal(self.logits, other.logits)


@pytest.mark.parametrize("kind, operation", CASES)
def test_an_interrupted_operation_has_happened_or_has_not(kind: str, operation: str) -> None:
    assert interrupted(kind, operation, times=6)


@pytest.mark.soak
@pytest.mark.parametrize("operation", SIGNALED)
def test_ten_thousand_interrupted_operations_have_happened_or_have_not(operation: str) -> None:
    kinds, hit, turn = [kind for kind in KINDS if applies(kind, operation)], 0, 0
    while hit < 10_000:
        hit += interrupted(kinds[turn % len(kinds)], operation, times=400)
        turn += 1
        assert hit > 100 * turn, "most come too late"
