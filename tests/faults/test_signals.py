"""Real interrupts at any moment of any operation: it has happened or it has not."""

from __future__ import annotations

import copy
import random
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch

import lmstate
from lmstate.state.layers import block_store
from lmstate.state.layers.block_store import BlockStore
from lmstate.state.layers.slots import SlotState
from tests.faults.harness import KINDS, OPERATIONS, Record, applies, draft, prepared
from tests.zoo import ours, text

SIGNALED = ("decode", "commit all", "commit some", "commit none", "rewind", "rewind far", "select", "restore", "drop")
STRIDE = 11  # lines between two that are interrupted
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
    assert interrupted(kind, operation, times=3)


@pytest.mark.soak
@pytest.mark.parametrize("operation", SIGNALED)
def test_ten_thousand_interrupted_operations_have_happened_or_have_not(operation: str) -> None:
    kinds, hit, turn = [kind for kind in KINDS if applies(kind, operation)], 0, 0
    while hit < 10_000:
        hit += interrupted(kinds[turn % len(kinds)], operation, times=400)
        turn += 1
        assert hit > 100 * turn, "most come too late"


class AtLine:
    """Interrupts the n-th line that runs in the module of block stores."""

    def __init__(self, n: int):
        self.left = n

    def __enter__(self) -> AtLine:
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != block_store.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.trace


def points_right(state: lmstate.State) -> bool:
    """Whether all blocks are where the tables say, and nothing is kept that was made of others."""
    leaves = [part for layer in state.layers for part in layer.leaves() if isinstance(part, SlotState)]
    stores = [part.content for part in leaves if isinstance(part.content, BlockStore)]
    return bool(stores) and all(
        tuple(store.tables[name].pointers[r, b] for name in store.buffers) == block.pointers
        if store.tables
        else not store.views
        for store in stores
        for r, row in enumerate(store.rows)
        for b, block in enumerate(row.blocks)
        if block is not None
    )


@pytest.mark.parametrize("length, warm", [(70, False), (62, True), (510, True)])
@pytest.mark.parametrize("case", ["llama", "mistral"])
def test_an_interrupt_leaves_no_table_of_blocks_that_points_elsewhere(case: str, length: int, warm: bool) -> None:
    """Of tables that are made anew, that get blocks, and that get more than they have places for."""
    model = ours(case)
    state = model.new_state(2)
    model([text(length)[0].tolist(), [3, 4]], state)

    def act(twin: lmstate.State) -> torch.Tensor:
        logits = model([[5, 6, 7, 8, 9], [6]], twin, logits="all", commit=False)
        twin.discard()
        assert logits is not None
        return logits

    want = act(copy.deepcopy(state))
    for n in range(1, 10_000, STRIDE):
        twin = copy.deepcopy(state)
        if warm:
            model([[1], [1]], twin, commit=False)
            twin.discard()
        at = AtLine(n)
        try:
            with at:
                act(twin)
        except KeyboardInterrupt:
            pass
        twin.discard()
        assert points_right(twin), f"line {n}"
        assert torch.equal(act(twin), want)
        if at.left > 0:  # it was over before
            break
    assert n > STRIDE
