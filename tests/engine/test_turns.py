"""Senders have turns: many requests of one do not put off another's, and no request waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lmstate
from lmstate.engine import QueueFull, Request
from lmstate.engine.delivery import Delivery
from lmstate.engine.job import AGING, Job, Terms
from lmstate.engine.turns import had_turn, turns
from lmstate.generation.params import SamplingParams
from lmstate.vision.reader import PicturePrompt
from tests.engine.test_batching import paused
from tests.waiting import GUARD
from tests.zoo import ours

SENDERS = "abcde"
MAX_PRIORITY = 2
ARRIVAL = st.tuples(st.sampled_from("aaab" + SENDERS), st.integers(-MAX_PRIORITY, MAX_PRIORITY))
ALIKE = ARRIVAL.map(lambda one: (one[0], 0))


def steps(arrival: st.SearchStrategy[tuple[str, int]]) -> st.SearchStrategy[list[tuple[list[tuple[str, int]], int]]]:
    """For each second those who come, and a number that says which of those who run end in it."""
    return st.lists(st.tuples(st.lists(arrival, max_size=4), st.integers(0, 2**16)), min_size=20, max_size=60)


@dataclass
class Rows:
    """Requests on a few rows, without a model: the time is the number of the step."""

    size: int
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    begun: list[Job] = field(default_factory=list)
    now: int = 0

    def come(self, sender: str, priority: int) -> None:
        request = Request([1], lambda: None, Delivery())
        terms = Terms(SamplingParams(), priority, sender=sender)
        job = Job(request, terms, len(self.begun) + len(self.waiting), PicturePrompt([1]))
        job.since = float(self.now)
        job.rank = job.rank_since
        self.waiting.append(job)

    def next(self) -> Job:
        places = turns([*self.waiting, *self.running])
        return min(self.waiting, key=lambda job: places[job])

    def begin(self, job: Job) -> None:
        self.waiting.remove(job)
        self.running.append(job)
        self.begun.append(job)

    def end(self, job: Job) -> None:
        self.running.remove(job)
        had_turn(job.sender, self.waiting, float(self.now))

    def free(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.size


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 4), steps(ALIKE))
def test_who_has_fewest_rows_is_next_and_each_other_begins_once_before_it(
    size: int, schedule: Sequence[tuple[list[tuple[str, int]], int]]
) -> None:
    rows = Rows(size)
    passed: dict[Job, Counter[str]] = {}  # requests of others that began while it was its sender's only one
    for arrivals, ends in schedule:
        rows.now += 1
        for sender, priority in arrivals:
            rows.come(sender, priority)
        for job in [job for place, job in enumerate(rows.running) if ends >> place & 1]:
            rows.end(job)
        while rows.free():
            own = Counter(job.sender for job in rows.running)
            firsts: dict[str, Job] = {}
            for job in rows.waiting:
                firsts.setdefault(job.sender, job)
            job = rows.next()
            assert job is firsts[job.sender], "first come, first served within a sender"
            assert own[job.sender] == min(own[sender] for sender in firsts)
            for sender, first in firsts.items():
                if not own[sender] and first is not job:
                    passed.setdefault(first, Counter())[job.sender] += 1
            rows.begin(job)
    assert all(count == 1 for each in passed.values() for count in each.values())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps(ARRIVAL))
def test_requests_of_one_sender_begin_by_priority_and_age(
    schedule: Sequence[tuple[list[tuple[str, int]], int]],
) -> None:
    rows = Rows(2)
    for arrivals, ends in schedule:
        rows.now += 1
        for _, priority in arrivals:
            rows.come("one", priority)
        for job in [job for place, job in enumerate(rows.running) if ends >> place & 1]:
            rows.end(job)
        while rows.free():
            job = rows.next()
            assert job is min(rows.waiting, key=lambda job: job.rank)
            rows.begin(job)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(st.lists(ARRIVAL, min_size=2, max_size=4), min_size=60, max_size=120), st.integers(0, 30))
def test_no_request_waits_for_ever(schedule: Sequence[list[tuple[str, int]]], at: int) -> None:
    """Twice as many come as there are rows for, of higher priorities, from senders old and new."""
    rows = Rows(1)
    for arrivals in schedule[:at]:
        for sender, priority in arrivals:
            rows.come(sender, priority)
    rows.come("patient", -MAX_PRIORITY)
    patient = rows.waiting[-1]
    aged = 2 * MAX_PRIORITY * int(AGING)  # from here on no later one is ranked before it
    for arrivals in (schedule * (1 + (aged + 50) // len(schedule)))[: aged + 2 * len(SENDERS)]:
        rows.now += 1
        for number, (sender, priority) in enumerate(arrivals):
            rows.come(sender if number else f"new {rows.now}", priority)
        for job in list(rows.running):
            rows.end(job)
        rows.begin(rows.next())
        if patient in rows.begun:
            return
    senders = {job.sender for job in rows.waiting if job.since / AGING - job.priority < patient.rank[0]}
    assert patient in rows.begun, f"{len(senders)} senders are before it after {rows.now} steps"


def test_of_a_sender_with_40_requests_and_one_with_a_single_one_each_begins_in_turn() -> None:
    ended: list[str] = []

    def note(name: str, _: Request) -> None:
        ended.append(name)

    with lmstate.Engine(ours("llama"), rows=1) as engine:
        go = paused(engine)
        requests = []
        for sender in ["many"] * 40 + ["one", "two", "two"]:
            request = engine.submit([1, 2, 3], max_new_tokens=2, sender=sender)
            request.when_done(partial(note, sender))
            requests.append(request)
        go.set()
        for request in requests:
            request.result(GUARD)
        engine.call(lambda _: None).result(GUARD)  # who waits for a result may hear of it before the callback
    assert ended[:6] == ["many", "one", "two", "many", "two", "many"]
    assert ended[6:] == ["many"] * 37


def test_rows_are_taken_back_from_the_sender_that_has_most() -> None:
    model = ours("llama")
    with lmstate.Engine(model, rows=8, memory="1GiB") as engine:
        work = engine._work
        go = paused(engine)
        requests = [engine.submit([1, 2, 3, n], max_new_tokens=400, ignore_eos=True, sender="many") for n in range(5)]
        requests += [engine.submit([1, 2, 3, 9], max_new_tokens=400, ignore_eos=True, sender="one")]

        def crowd(_: lmstate.Model) -> list[int]:
            while len(work.jobs) < 6:
                engine._scheduler.step()
            for _ in range(4):
                assert engine._scheduler._budget._preempt()
            return [job.order for job in work.at_work()]

        left = engine.call(crowd)
        go.set()
        assert sorted(left.result(GUARD)) == [0, 5]
        for request in requests:
            request.cancel()


def test_one_sender_leaves_places_in_the_queue_to_others() -> None:
    with lmstate.Engine(ours("llama"), rows=1, queue=16) as engine:
        go = paused(engine)
        requests = [engine.submit([1, 2], max_new_tokens=1, sender="many") for _ in range(14)]
        with pytest.raises(QueueFull, match="14 requests of this sender"):
            engine.submit([1, 2], max_new_tokens=1, sender="many")
        requests += [engine.submit([1, 2], max_new_tokens=1, sender=sender) for sender in ("one", "")]
        with pytest.raises(QueueFull, match="16 requests wait"):
            engine.submit([1, 2], max_new_tokens=1, sender="two")
        go.set()
        for request in requests:
            request.result(GUARD)


def test_a_sender_is_a_text() -> None:
    with lmstate.Engine(ours("llama"), rows=1) as engine, pytest.raises(ValueError, match="sender is 3"):
        engine.submit([1, 2], sender=3)  # type: ignore[arg-type]
