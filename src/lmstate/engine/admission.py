"""Admission: which request gets a row next, and from what it goes on."""

from __future__ import annotations

from dataclasses import replace

from lmstate.engine.job import Job, Preempted, Reader
from lmstate.engine.memory import CHECK_EVERY, MemoryBudget
from lmstate.engine.prefix.tree import shared
from lmstate.engine.workload import Workload
from lmstate.state.media import before_picture

WORTH_WAITING = 16  # tokens that another request is about to compute, for which one waits


class Admission:
    """Begins requests, and goes on with answers whose rows were taken back, in the order of their turns."""

    def __init__(self, work: Workload, budget: MemoryBudget) -> None:
        self._work, self._budget, self._reuse = work, budget, work.reuse

    def admit(self) -> None:
        """Start requests and answers while there are rows and bytes for them."""
        work = self._work
        if self._free() <= 0 or not (len(work.waiting) or work.preempted) or (work.crowded and self._budget.working()):
            return
        asides = [each for each in work.preempted if not (each.reading or each.job.request.rests())]
        waiting: list[Reader] = [*asides, *work.waiting.jobs()]
        for each in work.in_turn(waiting):
            if self._free() <= 0:
                return
            if isinstance(each, Preempted):
                if not self._budget.fits(len(each.text) + CHECK_EVERY, each.job.pictured):
                    return
                work.guarded(each.job, self._resume, each)
            elif not self._better_wait(each):
                if not self._budget.fits(len(each.prompt), each.pictured):
                    return  # no overtaking: small requests would starve a large one
                work.waiting.discard(each)
                work.guarded(each, self._start, each)

    def _free(self) -> int:
        work = self._work
        unseated = sum(len(job.unseated) for job in work.answering)
        return work.pool.most - len(work.jobs) - len(work.readers()) - unseated

    def _better_wait(self, job: Job) -> bool:
        """Whether another request is reading what this one begins with too, and has not come to where they part."""
        if self._reuse.fetching(job):
            return True
        reading = self._work.reading
        if job.follows is not None:
            leader, until = job.follows
            if leader in reading and leader.at < until:
                return True
            job.follows = None
            return False
        for leader in reading:
            keys = (self._work.model.network.frequency_key(len(each.prompt)) for each in (leader, job))
            if leader.salt != job.salt or len({*keys}) > 1:
                continue
            until = min(shared(leader.text, job.text), len(job.prompt) - 1)
            if self._work.model.network.whole_pictures:
                until = before_picture(job.pictured.media, until)
            if until - max(leader.at, self._reuse.match(job.text, job.pictured, job.salt).length) >= WORTH_WAITING:
                leader.cuts.add(until)
                job.follows = (leader, until)
                return True
        return False

    def _start(self, job: Job) -> None:
        job.passed()
        self._work.reading.append(job)
        job.state = self._reuse.begin(job)
        job.request.begin(job.reuse.reused)
        self._work.joined()
        self._work.counts["reused_tokens"] += job.reuse.reused
        if job.at == len(job.prompt):
            logits = self._work.model([[]], job.state)  # those after its last token, which are known
            assert logits is not None
            job.has_read(logits[0])

    def _resume(self, aside: Preempted) -> None:
        """Have the text of an answer that had a row be read again; if all of it is known, it has one at once."""
        job = aside.job
        prompt = replace(job.pictured, tokens=aside.text)
        state = self._reuse.resume(prompt, job.salt, len(job.prompt) if aside.echo else None)
        aside.at = state.lengths[0]
        if aside.left():
            aside.state, aside.reading = state, True
        else:
            self._work.preempted.remove(aside)
            self._work.seat(aside.choice, job, state)
