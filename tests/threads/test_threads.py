"""Threads: the number that was set, the number that measures best, and forked children that do not hang."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import lmstate
from lmstate import ops, threads
from tests.zoo import ours


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_number_that_was_set_is_the_number_that_runs() -> None:
    assert lmstate.set_threads(2) == 2 == torch.get_num_threads()
    assert lmstate.set_threads(1) == 1 == torch.get_num_threads()


@pytest.mark.parametrize("count", [0, -1, True, 1.5, None, "many", 10**6])
def test_a_number_that_is_none_is_refused_and_changes_nothing(count: object) -> None:
    before = torch.get_num_threads()
    with pytest.raises(ValueError):
        lmstate.set_threads(count)  # type: ignore[arg-type]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("cost", "expected"), [({1: 1, 2: 5, 3: 9}, 1), ({1: 9, 2: 5, 3: 1}, 3), ({1: 9, 2: 5, 3: 5}, 2)]
)
def test_auto_takes_the_fewest_threads_that_are_about_as_fast_as_the_best(
    monkeypatch: pytest.MonkeyPatch, cost: dict[int, int], expected: int
) -> None:
    now = 0.0

    def linear(x: torch.Tensor, weight: object) -> None:
        nonlocal now
        now += cost[torch.get_num_threads()]

    monkeypatch.setattr(ops, "linear", linear)
    monkeypatch.setattr(threads, "perf_counter", lambda: now)
    monkeypatch.setattr(threads, "available", lambda: 3)
    assert lmstate.set_threads("auto") == expected == torch.get_num_threads()


def test_auto_measures_and_stays_within_the_processors() -> None:
    assert 1 <= lmstate.set_threads("auto") <= threads.available()


def test_the_counts_that_are_tried_end_at_the_processors() -> None:
    assert threads._counts(1) == [1]
    assert threads._counts(2) == [1, 2]
    assert threads._counts(10) == [1, 2, 3, 4, 6, 8, 10]


FORK = """
import multiprocessing, sys, torch, lmstate
from tests.zoo import ours

model = ours("llama")
text = [[(7 * i) % 90 + 1 for i in range(300)]]
torch.set_num_threads(4)
expected = model(text)  # the parent's threads exist now

def child(queue):
    try:
        lmstate.set_threads(2)
        refused = "not refused"
    except RuntimeError as error:
        refused = str(error)
    torch.testing.assert_close(model(text), expected)
    queue.put((torch.get_num_threads(), lmstate.set_threads("auto"), refused))

queue = multiprocessing.get_context("fork").Queue()
process = multiprocessing.get_context("fork").Process(target=child, args=(queue,))
process.start()
process.join(600)
if process.is_alive():
    process.kill()
    sys.exit("the child hangs")
print(queue.get(timeout=60), torch.get_num_threads())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a platform without fork")
def test_a_forked_child_runs_on_one_thread_and_refuses_more() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(1, 1, 'set_threads(2) was asked for in a forked process")
    assert done.stdout.endswith(" 4\n")


def test_workers_that_were_given_up_come_back() -> None:
    """As the thread that makes an engine does; also twice, and before anything was computed."""
    model = ours("llama")
    expected = model([[1, 2, 3]])
    for _ in range(2):
        threads.release_threads()
        threads.release_threads()
        assert torch.equal(model([[1, 2, 3]]), expected)
