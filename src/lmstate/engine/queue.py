"""Requests that wait, from any thread, and how many may. `turns` has their order."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock

from lmstate.engine.job import Job
from lmstate.engine.results import QueueFull

OTHERS = 8  # one place in eight is kept for senders other than the one that has all the others


class Queue:
    """Safe to use from any thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._jobs: list[Job] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Raises QueueFull if as many wait as may: of all, or of its sender, if it has one."""
        with self._lock:
            own = sum(other.sender == job.sender for other in self._jobs) if job.sender else 0
            share = self.most - self.most // OTHERS
            if len(self._jobs) < self.most and own < share:
                self._jobs.append(job)
                return
        waiting = f"{own} requests of this sender" if own >= share else f"{self.most} requests"
        raise QueueFull(
            f"{waiting} wait already, as many as this engine holds: send it again later, or make the engine with a "
            "larger queue="
        )

    def put_back(self, job: Job) -> None:
        """Have a request that was begun wait again: it is not refused, however many wait."""
        with self._lock:
            self._jobs.append(job)

    def discard(self, job: Job) -> None:
        """Take a job out, if it is here."""
        with self._lock, suppress(ValueError):
            self._jobs.remove(job)

    def jobs(self) -> list[Job]:
        """Those that wait, in no order."""
        with self._lock:
            return list(self._jobs)
