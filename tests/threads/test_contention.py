"""Fewer threads while other processes keep processors busy, and all of them again afterwards."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
import torch

from lmstate.ops import dispatch
from lmstate.ops.cpu import contention
from lmstate.ops.cpu.contention import Contention, busy_seconds
from tests.zoo import ours

TICKS = 100


class Machine:
    """Processors whose `/proc/stat` and clocks a test moves on."""

    def __init__(self, processors: int, path: Path):
        self.busy = [0.0] * processors
        self.now = 0.0
        self.own = 0.0
        self.path = path
        self.write()

    def write(self) -> None:
        each = (f"cpu{i} {int(busy * TICKS)} 0 0 7 5 0 0 0 0 0" for i, busy in enumerate(self.busy))
        self.path.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *each, "intr 1", ""]), encoding="ascii")

    def run(self, seconds: float, own: float, others: float) -> None:
        """That time passes, with so many processors busy with this process, and with others."""
        self.now += seconds
        self.own += own * seconds
        for i in range(len(self.busy)):
            self.busy[i] += (own + others) * seconds / len(self.busy)
        self.write()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    machine = Machine(4, tmp_path / "stat")
    monkeypatch.setattr(contention, "STAT", machine.path)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(time, "process_time", lambda: machine.own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: TICKS)
    monkeypatch.delenv(contention.VARIABLE, raising=False)
    return machine


def threads(machine: Machine, measured: Contention, most: int, own: float, others: float) -> int:
    """Those of the second of two parts of a call."""
    measured.threads(most)
    machine.run(1.0, own, others)
    left = measured.threads(most)
    measured.rest()
    return left


@pytest.mark.parametrize(
    ("most", "others", "expected"),
    [
        (4, 0.0, 4),
        (4, 0.2, 4),
        (4, 0.5, 3),
        (4, 1.0, 3),
        (4, 2.1, 2),
        (4, 9.0, 1),
        (2, 1.0, 2),
        (2, 2.2, 2),
        (2, 3.0, 1),
        (1, 4.0, 1),
        (6, 1.0, 5),
    ],
)
def test_threads_are_those_that_others_leave_a_processor(
    machine: Machine, most: int, others: float, expected: int
) -> None:
    assert threads(machine, Contention(), most, own=min(4.0, most), others=others) == expected


def test_the_number_comes_back_when_the_others_are_gone(machine: Machine) -> None:
    measured = Contention()
    assert [threads(machine, measured, 4, 3.0, others) for others in (0.0, 2.0, 0.0)] == [4, 2, 4]


def test_own_threads_that_wait_awake_are_no_load(machine: Machine) -> None:
    assert threads(machine, Contention(), 4, own=4.0, others=0.0) == 4


def test_what_was_found_long_ago_says_nothing(machine: Machine) -> None:
    measured = Contention()
    assert threads(machine, measured, 4, 1.0, 3.0) == 1
    machine.run(1.0, 0.0, 0.0)
    assert measured.threads(4) == 1
    measured.rest()
    machine.run(3600.0, 0.0, 4.0)
    assert measured.threads(4) == 4


def test_what_others_do_while_nothing_is_computed_takes_no_thread(machine: Machine) -> None:
    measured = Contention()
    for _ in range(3):  # of two processes that wait for each other, both have all processors
        for _ in range(2):
            assert measured.threads(4) == 4
            machine.run(0.4, 4.0, 0.0)
        measured.rest()
        machine.run(0.8, 0.0, 4.0)
    for _ in range(3):  # calls in quick succession are one work
        machine.run(0.05, 0.0, 4.0)
        left = measured.threads(4)
        machine.run(0.2, 1.0, 3.0)
        measured.rest()
    assert left == 1


def test_a_call_that_is_long_and_has_one_part_is_measured_too(machine: Machine) -> None:
    measured = Contention()
    assert measured.threads(4) == 4
    machine.run(10.0, 2.0, 2.0)
    measured.rest()
    machine.run(1.0, 0.0, 0.0)
    assert measured.threads(4) == 2
    machine.run(10.0, 4.0, 0.0)
    measured.rest()
    assert measured.threads(4) == 4


def test_the_variable_keeps_the_number(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contention.VARIABLE, "fixed")
    assert threads(machine, Contention(), 4, 1.0, 3.0) == 4


@pytest.mark.parametrize(
    "text", ["", "cpu 1 2 3\n", "cpu0 1 2 3 4 5\n", "cpu0 1\ncpu1 1\ncpu2 1\ncpu3 1\n", "cpu0 a b\n"]
)
def test_a_system_that_does_not_tell_keeps_the_number(machine: Machine, text: str) -> None:
    measured = Contention()
    machine.path.write_text(text, encoding="ascii")
    assert measured.threads(4) == 4
    assert threads(machine, measured, 4, 1.0, 3.0) == 4


@pytest.mark.skipif(dispatch.choice().library is None, reason="no native library was built")
def test_a_call_runs_on_the_threads_that_are_left_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before, seen = ours("llama"), torch.get_num_threads(), []

    def note(name: str, given: torch.Tensor, made: torch.Tensor) -> None:
        seen.append(torch.get_num_threads())

    def fail(name: str, given: torch.Tensor, made: torch.Tensor) -> None:
        raise KeyError(name)

    left = itertools.cycle([3, 2])  # of the call, and of its part
    monkeypatch.setattr(contention.contention, "threads", lambda most: next(left))
    try:
        torch.set_num_threads(3)
        expected = model([[5, 6, 7]])
        assert torch.equal(model.trace([[5, 6, 7]], on=note), expected)
        assert set(seen) == {2} and torch.get_num_threads() == 3
        with pytest.raises(KeyError):
            model.trace([[5, 6, 7]], on=fail)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_what_waits_for_a_disk_is_idle_and_a_guest_counts_once() -> None:
    text = "cpu 0 0 0 0\ncpu0 10 20 30 999 888 40 50 60 70 80\ncpu1 500 0 0 0 0 0 0 0 0 0\nctxt 5\n"
    assert busy_seconds(text, {0}, 10) == 21.0
    assert busy_seconds(text, {0, 2}, 10) is None


@pytest.mark.skipif(not contention.STAT.exists(), reason="a system without /proc/stat")
def test_this_system_tells_and_time_goes_on() -> None:
    here = os.sched_getaffinity(0)
    first, second = (busy_seconds(contention.STAT.read_text(), here, os.sysconf("SC_CLK_TCK")) for _ in range(2))
    assert first is not None and second is not None and second >= first >= 0
