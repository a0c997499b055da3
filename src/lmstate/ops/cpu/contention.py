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

VARIABLE = "LMSTATE_THREADS"
"""`fixed`: the number that was set, whatever else runs."""

INTERVAL = 0.25  # seconds between two looks
IDLE = 0.1  # seconds between two calls: CPU use during longer gaps does not count as contention
STALE = 2.0  # seconds after which what was found says nothing of now
SHARED = 0.3  # of a processor: a competitor of one of our threads gets about half
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
    """Measures what other processes take of the processors while this one computes, now and then.

    A computation calls `threads` before it begins, and between its parts if it is long, and `rest` after it.
    """

    def __init__(self) -> None:
        self._measures = hasattr(os, "sched_getaffinity") and os.environ.get(VARIABLE, "").strip().lower() != "fixed"
        self._before: Look | None = None
        self._rested = float("inf")  # since when nothing is computed
        self._found = 0.0  # when `_taken` was measured
        self._taken = 0
        self._processors = 1
        self._lock = threading.Lock()

    def threads(self, most: int) -> int:
        """The number of threads, up to `most`, that have a processor for themselves; at least 1."""
        if most == 1 or not self._measures:
            return most
        now = time.perf_counter()
        if now > self._rested + IDLE:
            self._before = None
        self._rested = float("inf")
        self._look_when_due(now)
        if not self._taken:
            return most
        spare = max(0, self._processors - most)
        return max(1, most - max(0, self._taken - spare))

    def rest(self) -> None:
        """Nothing is computed from here on."""
        self._rested = now = time.perf_counter()
        if self._before is not None:
            self._look_when_due(now)

    def _look_when_due(self, now: float) -> None:
        before = self._before
        if (before is None or now >= before.at + INTERVAL) and self._lock.acquire(blocking=False):
            try:
                self._look(now, before)
            finally:
                self._lock.release()

    def _look(self, now: float, before: Look | None) -> None:
        here = os.sched_getaffinity(0)
        try:
            busy = busy_seconds(STAT.read_text(encoding="ascii"), here, os.sysconf("SC_CLK_TCK"))
        except (OSError, ValueError):
            busy = None
        if busy is None:  # a system that does not tell will not tell later
            self._measures, self._before, self._taken = False, None, 0
            return
        look = Look(now, busy, time.process_time())
        if before is not None and len(here) == self._processors:
            self._taken, self._found = look.processors_taken(before), now
        elif now > self._found + STALE:
            self._taken = 0
        self._before, self._processors = look, len(here)


contention = Contention()
