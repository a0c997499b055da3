"""Real interrupts at any moment of any operation: it has happened or it has not."""

from __future__ import annotations

import copy
import random
import signal
import sys
import threading
import time

import pytest

from tests.faults.harness import KINDS, OPERATIONS, Record, applies, draft, prepared

SIGNALED = ("decode", "commit all", "commit some", "commit none", "rewind", "rewind far", "select", "restore", "drop")
CASES = [(kind, operation) for kind in KINDS for operation in SIGNALED if applies(kind, operation)]

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or threading.current_thread() is not threading.main_thread(), reason="signals are POSIX's"
)


def interrupted(kind: str, operation: str, times: int) -> int:
    """Interrupt so many of them; how many interrupts came in time."""
    model, state = prepared(kind)
    if operation.startswith("commit"):
        draft(model, state)
    act = OPERATIONS[operation]
    done, lasted = copy.deepcopy(state), []
    for twin in (done, copy.deepcopy(state), copy.deepcopy(state)):
        begin = time.perf_counter()
        act(model, twin)
        lasted.append(time.perf_counter() - begin)
    before, after = Record(model, state), Record(model, done)
    generator, hit = random.Random(0), 0
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(times):
            twin = copy.deepcopy(state)
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, generator.uniform(0, 1.2 * min(lasted))))
                act(model, twin)
                time.sleep(0.01)
            except KeyboardInterrupt:
                hit += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            # An interrupt may come between a forward and its end: what is pending then is of no forward, and goes.
            got = Record(model, twin)
            assert got in (before, after), f"torn: {got.lengths} of {before.lengths} and {after.lengths}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return hit


@pytest.mark.parametrize("kind, operation", CASES)
def test_an_interrupted_operation_has_happened_or_has_not(kind: str, operation: str) -> None:
    assert interrupted(kind, operation, times=6)


@pytest.mark.soak
@pytest.mark.parametrize("kind, operation", CASES)
def test_ten_thousand_interrupted_operations_have_happened_or_have_not(kind: str, operation: str) -> None:
    assert interrupted(kind, operation, times=10_000) > 1000
