"""Draining the replicas of a running server over its API, one or all of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any, Protocol

LOOK = 0.5  # seconds between two looks at whether a drained replica was replaced
REPLACED = 900.0  # seconds that replacing one may take: its model is loaded


class Ask(Protocol):
    """Ask a server: GET, or POST of a body. `wait`: seconds that it may take beside the usual ones."""

    def __call__(self, path: str, body: dict[str, Any] | None = None, wait: float = 0.0) -> dict[str, Any]: ...


def drain_one(ask: Ask, rank: int, seconds: float) -> tuple[int, bool]:
    """Drain the replica of a rank. Returns (its rank, whether the store took all that it had computed)."""
    told = ask("/v1/replicas/drain", {"rank": rank, "seconds": seconds}, seconds + 120.0)
    return rank, bool(told["stored"])


def drain_all(
    ask: Ask, seconds: float, patience: float = REPLACED, rest: Callable[[float], object] = sleep
) -> Iterator[tuple[int, bool]]:
    """Drain each replica, the next one when another process takes requests at the rank of the one before.

    Raises TimeoutError for one that is not replaced within `patience` seconds.
    """
    for rank, id in _processes(ask).items():
        yield drain_one(ask, rank, seconds)
        until = monotonic() + patience
        while _processes(ask).get(rank, id) == id:
            if monotonic() > until:
                raise TimeoutError(f"replica {rank} was drained, and not replaced within {patience:.0f} seconds")
            rest(LOOK)


def _processes(ask: Ask) -> dict[int, str]:
    """The ids of the replicas that take requests, by rank."""
    return {each["rank"]: each["id"] for each in ask("/v1/replicas")["data"] if each["takes"]}
