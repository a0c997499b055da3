"""Requests that wait: larger priorities first, first come first served within one, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

from lmstate.engine.job import Job
from lmstate.engine.results import QueueFull

AGING = 10.0  # seconds of waiting that are worth one step of priority


class Queue:
    def __init__(self, most: int) -> None:
        self.most = most
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Raises QueueFull if as many wait as may."""
        if len(self._jobs) >= self.most:
            raise QueueFull(
                f"{self.most} requests wait already, as many as this engine holds: send it again later, or make the "
                "engine with a larger queue="
            )
        self._jobs.append(job)

    def remove(self, job: Job) -> None:
        self._jobs.remove(job)

    def __iter__(self) -> Iterator[Job]:
        """In the order in which they are to start."""
        return iter(sorted(self._jobs, key=lambda job: (-job.options.priority - job.waited() // AGING, job.order)))
