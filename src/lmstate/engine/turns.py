"""Turns: one order of all requests, in which senders share the rows and each sender's own go by their ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from lmstate.engine.job import Job, Rank

Turn: TypeAlias = tuple[int, Rank]


def turns(jobs: Iterable[Job]) -> Mapping[Job, Turn]:
    """The place of each of these requests, all that have not ended: smaller ones begin, read and keep rows first.

    A request's turn is the number of answers that its sender wants before it, by rank. So a sender with few requests
    is served before the later ones of a sender with many, and rows are shared evenly between senders who have work.
    Answers that rest, because their readers are behind, do not count.

    Between equal numbers the sender that has waited longest since one of its requests ended comes first: with fewer
    rows than senders each gets one in its turn, however many others come.
    """
    ahead: defaultdict[str, int] = defaultdict(int)
    places: dict[Job, Turn] = {}
    for job in sorted(jobs, key=lambda job: job.rank):
        places[job] = (ahead[job.sender], job.rank_since)
        if not job.request.rests():
            ahead[job.sender] += job.params.n
    return places


def had_turn(sender: str, waiting: Iterable[Job], now: float) -> None:
    """Note that a request of a sender has ended: others who wait come before its next one."""
    for job in waiting:
        if job.sender == sender:
            job.since = now
