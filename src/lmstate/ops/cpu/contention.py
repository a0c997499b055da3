"""Number of threads that a model runs on now: fewer than were set while other processes keep processors busy.

The threads of an operation wait for each other many times in a layer. One that has to share its processor holds up all
others for as long as it gets no turn, and two threads beside a busy process are several times slower than one. Results
do not depend on the number, so it may change from call to call.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

VARIABLE = "LMSTATE_THREADS"
"""`fixed`: the number that was set, whatever else runs."""

INTERVAL = 0.25  # seconds between two looks
STALE = 2.0  # seconds after which the look before says nothing of now
SHARED = 0.3  # of a processor: whoever competes with a thread of ours for one gets about half
STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Look:
    """Seconds at one moment: of the clock, that the processors were busy in all, and that this process used."""

    at: float
    busy: float
    own: float

    def processors_taken(self, before: Look) -> int:
        """The processors that others kept busy since then; a part of one counts from `SHARED` on."""
        elapsed = self.at - before.at
        others = (self.busy - before.busy) - (self.own - before.own)
        return max(0, int(others / elapsed + 1 - SHARED))


def busy_seconds(stat: str, processors: set[int], ticks: int) -> float | None:
    """Seconds that these processors were not idle, of a text as in `/proc/stat`; None where it does not tell."""
    busy = 0
    found = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if not name.startswith("cpu"):
            break
        if name[3:].isdecimal() and int(name[3:]) in processors:
            numbers = [int(field) for field in fields[:8]]  # what follows is counted in these already
            if len(numbers) < 5:
                return None
            busy += sum(numbers) - numbers[3] - numbers[4]  # idle, and waiting for a disk
            found += 1
    return busy / ticks if found == len(processors) else None


class Contention:
    """Measures what other processes take of the processors, now and then, as it is asked for threads."""

    def __init__(self) -> None:
        measures = hasattr(os, "sched_getaffinity") and os.environ.get(VARIABLE, "").strip().lower() != "fixed"
        self._next = 0.0 if measures else float("inf")
        self._before: Look | None = None
        self._taken = 0
        self._processors = 1
        self._lock = threading.Lock()

    def threads(self) -> int:
        """Torch's number of threads, less those for which others leave no processor; at least 1."""
        most = torch.get_num_threads()
        if most == 1:
            return 1
        if time.perf_counter() >= self._next and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        if not self._taken:
            return most
        spare = max(0, self._processors - most)
        return max(1, most - max(0, self._taken - spare))

    def _look(self) -> None:
        here = os.sched_getaffinity(0)
        try:
            busy = busy_seconds(STAT.read_text(encoding="ascii"), here, os.sysconf("SC_CLK_TCK"))
        except (OSError, ValueError):
            busy = None
        if busy is None:  # a system that does not tell will not tell later
            self._next, self._taken = float("inf"), 0
            return
        look, before = Look(time.perf_counter(), busy, time.process_time()), self._before
        if before is not None and look.at - before.at < STALE and len(here) == self._processors:
            self._taken = look.processors_taken(before)
        self._before, self._processors, self._next = look, len(here), look.at + INTERVAL


threads_now = Contention().threads
